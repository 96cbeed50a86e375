"""`python -m forgemq_reward` runs the service, `python -m forgemq_reward replay` its journal."""

import os
import sys

from forgemq_reward.app import main, transform_of
from forgemq_shell.replay_command import run_transform_service

if __name__ == "__main__":
    name, arguments = "reward", sys.argv[1:]
    sys.exit(
        run_transform_service(
            name, main, transform_of=transform_of, arguments=arguments, environ=os.environ
        )
    )
