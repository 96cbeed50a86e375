"""`python -m forgemq.trainer`."""

import os
import sys

from forgemq.shell.service import run_service
from forgemq.trainer.app import main

if __name__ == "__main__":
    sys.exit(run_service("trainer", main, os.environ))
