"""What a run with adapters must and must not have."""

from forgemq_contracts.lane_engines import is_paired, shapes_of
from forgemq_contracts.run import RunConfiguration


def check_lora(configuration: RunConfiguration) -> None:
    """Refuse what a run with adapters cannot do.

    Raises:
        ValueError: Names the field and the rule.
    """
    lora = configuration.lora
    if lora is None:
        return
    if len(set(lora.targets)) != len(lora.targets):
        raise ValueError(f"lora.targets must name each layer once, got {list(lora.targets)}")
    if lora.publish == "adapter":
        _check_engines(configuration)


def _check_engines(configuration: RunConfiguration) -> None:
    beside = {
        "speculation": configuration.speculation is not None,
        "pool": configuration.pool is not None,
        "lanes.prefill": any(map(is_paired, configuration.lanes)),
        "lanes.attention_data_parallel": any(
            shape.attention_data_parallel > 1
            for lane in configuration.lanes
            for shape in shapes_of(lane)
        ),
        "model.engine_quantization": configuration.model.engine_quantization != "none",
    }
    for field, is_given in beside.items():
        if is_given:
            raise ValueError(
                f"{field} must be left out if lora.publish is adapter: nobody has tried them "
                'together; lora.publish = "merged" works with it'
            )
