"""What a model's config.json says of its format."""

import json
from collections.abc import Sequence
from typing import Any

from forgemq_fp8_blocks.values import BLOCK


def quantisation(left: Sequence[str]) -> dict[str, Any]:
    """The field `quantization_config`; `left` are the modules that are not quantised."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": list(left),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def has_fp8_blocks(config: bytes) -> bool:
    """Whether a config.json is that of a model in this format."""
    named = json.loads(config).get("quantization_config") or {}
    is_fp8: bool = named.get("quant_method") == "fp8"
    return is_fp8 and named.get("weight_block_size") == [BLOCK, BLOCK]
