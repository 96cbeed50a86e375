"""An engine on a GPU that computes in float32, to be compared with float32 on a CPU."""

import os

FLAGS = ("--dtype", "float32", "--attention-backend", "triton")

VARIABLES = {
    # SGLang's norms of CUDA have no float32: norms, gates and rotations run in plain torch.
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    # Triton multiplies float32 in TF32 otherwise.
    "TRITON_F32_DEFAULT": "ieee",
}


def environment() -> dict[str, str]:
    """The environment of such an engine's start."""
    return {**os.environ, **VARIABLES}
