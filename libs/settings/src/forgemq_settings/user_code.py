"""The environment that code of the run's author gets."""

from collections.abc import Mapping

_OURS = "FORGEMQ_"


def for_user_code(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without our own variables: they hold keys and passwords."""
    return {name: value for name, value in environ.items() if not name.startswith(_OURS)}
