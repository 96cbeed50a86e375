"""`python -m forgemq_sglang_cpu`: SGLang's server, which ends with the process that started it."""

import os
import runpy

from forgemq_sglang_cpu.orphan import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(os.environ["FORGEMQ_ENGINE_PARENT"]))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
