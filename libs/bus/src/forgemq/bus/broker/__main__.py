"""`python -m forgemq.bus.broker --folder DIR`: a broker in the foreground, until Ctrl-C."""

import sys
from pathlib import Path

from forgemq.bus.broker.local import run_in_foreground

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--folder":
        sys.exit("usage: python -m forgemq.bus.broker --folder DIR")
    sys.exit(run_in_foreground(Path(sys.argv[2])))
