"""`python -m forgemq.scheduler`."""

import os
import sys

from forgemq.scheduler.app import main
from forgemq.shell.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("scheduler", main, os.environ))
