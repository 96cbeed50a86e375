"""`python -m forgemq_bus.broker --folder DIR`: a broker in the foreground, until Ctrl-C."""

import sys
from pathlib import Path

from forgemq_bus.broker.local import run_in_foreground

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--folder":
        sys.exit("usage: python -m forgemq_bus.broker --folder DIR")
    sys.exit(run_in_foreground(Path(sys.argv[2])))
