"""`python -m forgemq_inference`."""

import os
import sys

from forgemq_inference.app import main
from forgemq_shell.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("inference", main, os.environ))
