"""`python -m forgemq_trainer`."""

import os
import sys

from forgemq_trainer.rank_process import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(os.environ))
