"""The folder from which engines begin: `python -m forgemq_fp8_blocks MODEL FOLDER`."""

import argparse
import sys
from pathlib import Path

from forgemq_fp8_blocks.folder import quantise_model
from forgemq_fp8_blocks.plan import NothingToQuantiseError


def main() -> int:
    """Write it; the exit status is 1 if that cannot be, with one line that says why."""
    parser = argparse.ArgumentParser(prog="python -m forgemq_fp8_blocks", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the model in full")
    parser.add_argument("folder", type=Path, help="to write; must not exist")
    options = parser.parse_args()
    try:
        quantise_model(options.model, options.folder)
    except (OSError, NothingToQuantiseError) as error:
        sys.stderr.write(f"{options.model}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
