"""`python -m forgemq.agents`."""

import os
import sys

from forgemq.agents.app import run_agents

if __name__ == "__main__":
    sys.exit(run_agents(os.environ))
