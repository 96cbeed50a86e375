"""`python -m forgemq_agents` plays a run; with `import` it adds finished conversations to one."""

import os
import sys

from forgemq_agents.app import run_agents
from forgemq_agents.import_command import run_import
from forgemq_settings.hidden_process import hide_process
from forgemq_settings.user_code import taken_from

if __name__ == "__main__":
    hide_process()
    arguments, environ = sys.argv[1:], taken_from(os.environ)
    sys.exit(run_import(arguments, environ) if arguments else run_agents(environ))
