"""`python -m forgemq_agents` plays a run; with `import` it adds finished conversations to one."""

import os
import sys

from forgemq_agents.app import run_agents
from forgemq_agents.import_command import run_import

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(run_import(arguments, os.environ) if arguments else run_agents(os.environ))
