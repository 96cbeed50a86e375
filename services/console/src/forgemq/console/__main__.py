"""`python -m forgemq.console`."""

import os
import sys

from forgemq.console.app import main
from forgemq.shell.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("console", main, os.environ))
