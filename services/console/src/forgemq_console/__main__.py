"""`python -m forgemq_console`."""

import os
import sys

from forgemq_console.app import main
from forgemq_settings.hidden_process import hide_process
from forgemq_shell.service import run_service

if __name__ == "__main__":
    hide_process()
    sys.exit(run_service("console", main, os.environ))
