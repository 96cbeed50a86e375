"""`python -m forgemq.trainer`."""

import os
import sys

from forgemq.shell.service import run_service
from forgemq.trainer.app import main
from forgemq.trainer.follower import run_follower
from forgemq.trainer.ranks import launch_of

if __name__ == "__main__":
    if launch_of(os.environ).rank > 0:
        sys.exit(run_follower(os.environ))
    sys.exit(run_service("trainer", main, os.environ))
