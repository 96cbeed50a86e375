"""`python -m forgemq_gateway`: see the README for its settings."""

import os
import sys

import uvloop

from forgemq_gateway.app import main
from forgemq_settings.hidden_process import hide_process
from forgemq_shell.service import run_service

if __name__ == "__main__":
    hide_process()
    sys.exit(run_service("gateway", main, os.environ, loop_factory=uvloop.new_event_loop))
