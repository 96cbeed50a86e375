"""`python -m forgemq.reward`."""

import os
import sys

from forgemq.reward.app import main
from forgemq.shell.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("reward", main, os.environ))
