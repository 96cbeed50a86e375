"""`python -m forgemq_agents`."""

import os
import sys

from forgemq_agents.app import run_agents

if __name__ == "__main__":
    sys.exit(run_agents(os.environ))
