"""`python -m forgemq.merger`."""

import os
import sys

from forgemq.merger.app import main
from forgemq.shell.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("merger", main, os.environ))
