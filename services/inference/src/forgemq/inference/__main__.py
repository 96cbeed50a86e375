"""`python -m forgemq.inference`."""

import os
import sys

from forgemq.inference.app import main
from forgemq.shell.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("inference", main, os.environ))
