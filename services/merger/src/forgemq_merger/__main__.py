"""`python -m forgemq_merger`; with `replay` it runs its journal again and compares."""

import os
import sys

from forgemq_merger.app import main, transform_of
from forgemq_shell.replay_command import run_transform_service

if __name__ == "__main__":
    name, arguments = "merger", sys.argv[1:]
    sys.exit(
        run_transform_service(
            name, main, transform_of=transform_of, arguments=arguments, environ=os.environ
        )
    )
