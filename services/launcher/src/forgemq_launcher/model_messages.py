"""Whether a gateway can make messages into tokens of the model; checked before anything starts."""

from forgemq_contracts.domains import histories_of
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import ConfigurationError


def check_messages(configuration: RunConfiguration) -> None:
    """Load what the gateway loads: tokenizer, chat template or renderer, and end-of-turn tokens.

    Raises:
        ConfigurationError: naming what is missing, damaged or unknown.
    """
    from forgemq_rendering import Rendering  # Takes 0.6 s, which other commands do without.

    folder, renderer = configuration.model.path, configuration.model.renderer
    try:
        for history in histories_of(configuration):
            Rendering.load(folder, renderer=renderer, history=history)
    except (OSError, ValueError) as error:
        said = str(error)
        key = "" if said.startswith("model.renderer: ") else "model.path: "
        raise ConfigurationError(f"{key}{said}") from error
