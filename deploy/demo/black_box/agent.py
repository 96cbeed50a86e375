"""Plays an episode by running `desk_agent.py`, which knows nothing of ForgeMQ."""

import sys
from pathlib import Path

from forgemq_agents.black_box import black_box

play = black_box(
    (sys.executable, "-m", "black_box.desk_agent", "{task_file}", "{result_file}"),
    timeout_s=120,
    environ={"PYTHONPATH": str(Path(__file__).parent.parent)},
)
