"""The environment that the user's code gets."""

from collections.abc import Mapping

_PREFIX = "FORGEMQ_"


def for_user_code(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the `FORGEMQ_*` variables: they hold keys and passwords."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIX)}
