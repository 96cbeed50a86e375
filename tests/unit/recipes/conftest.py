"""The shapes of trees that load tests have are used here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "loadtests"))
