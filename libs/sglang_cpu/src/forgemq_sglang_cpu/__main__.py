"""`python -m forgemq_sglang_cpu`: an engine in the foreground, or the child of an EngineServer.

EngineServer sets FORGEMQ_ENGINE_PARENT for its child, which becomes SGLang's server and ends when
that parent does.
"""

import os
import runpy
import sys

from forgemq_sglang_cpu.foreground import run_in_foreground
from forgemq_sglang_cpu.orphan import end_with_parent

if __name__ == "__main__":
    if "FORGEMQ_ENGINE_PARENT" not in os.environ:
        sys.exit(run_in_foreground(sys.argv[1:]))
    end_with_parent(int(os.environ["FORGEMQ_ENGINE_PARENT"]))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
