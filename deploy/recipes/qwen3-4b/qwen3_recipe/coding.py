"""Coding with mini-swe-agent as a black box: a row has `question` and `tests`.

What the policy submits is a program, which is run against the row's tests in the graders' own
sandbox. So it does not matter what else the container, or the scaffold, reports.
"""

import os
from pathlib import Path

from forgemq_agents.black_box import black_box
from forgemq_contracts.grading import GradingEpisode
from forgemq_graders import SandboxLimits, code_tests

FOLDER = Path(__file__).parents[1]
# Where `python -m tests.clients.install mini_swe_agent` puts it.
INSTALLED = FOLDER.parents[2] / ".cache/clients/mini_swe_agent/venv/bin/python"

# The scaffold's own variables: those of ForgeMQ do not reach a program of the user.
PYTHON = os.environ.get("SCAFFOLD_PYTHON", str(INSTALLED))  # noqa: TID251
CONFIGURATION = os.environ.get("SCAFFOLD_CONFIGURATION", str(FOLDER / "scaffold.yaml"))  # noqa: TID251

play = black_box(
    (PYTHON, "-m", "qwen3_recipe.scaffold", CONFIGURATION, "{task_file}", "{result_file}"),
    timeout_s=1800,
    environ={
        "PYTHONPATH": str(FOLDER),
        "MSWEA_SILENT_STARTUP": "1",
        # litellm would load a list of prices from the network.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)


def submission(episode: GradingEpisode) -> str:
    """The submitted program; "" if the episode ended without one."""
    result = episode.result
    submitted = result.get("submission") if isinstance(result, dict) else None
    return submitted if isinstance(submitted, str) else ""


outcome = code_tests(
    limits=SandboxLimits(time_s=10, cpu_s=10), at_once=4, is_share=True, program=submission
)
