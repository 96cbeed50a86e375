"""`python -m forgemq_auditor`."""

import os
import sys

from forgemq_auditor.app import main
from forgemq_settings.hidden_process import hide_process
from forgemq_shell.service import run_service

if __name__ == "__main__":
    hide_process()
    sys.exit(run_service("auditor", main, os.environ))
