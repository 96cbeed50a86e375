"""The environment that the user's code gets, and where it is imported from."""

import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence

# ForgeMQ's own, and those by which clients of object stores and of telemetry find credentials.
_SECRET = re.compile(
    "|".join(
        (
            "FORGEMQ_.*",
            "AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|PROFILE)",
            "AWS_(SHARED_CREDENTIALS_FILE|CONFIG_FILE|WEB_IDENTITY_TOKEN_FILE|ROLE_ARN)",
            "AWS_CONTAINER_.*",
            "FSSPEC_.*",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "AZURE_(STORAGE_.*|CLIENT_SECRET|CLIENT_CERTIFICATE_PATH|FEDERATED_TOKEN_FILE)",
            "OTEL_EXPORTER_.*_HEADERS",
        )
    )
)


def for_user_code(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that hold or name credentials of the run.

    These are all of `FORGEMQ_*`, and those of object stores and telemetry. What the user's code
    needs of that kind is given to it under another name, as `JUDGE_KEY`.
    """
    return {name: value for name, value in environ.items() if not _SECRET.fullmatch(name)}


def taken_from(environ: MutableMapping[str, str]) -> dict[str, str]:
    """All of a process's environment, in which afterwards only what `for_user_code` leaves is left.

    So a program that the user's code in this process starts inherits no more than that.
    """
    taken = dict(environ)
    for name in taken.keys() - for_user_code(taken).keys():
        del environ[name]
    return taken


def add_code_paths(paths: Sequence[str]) -> None:
    """Append the user's folders to the import path: installed modules keep precedence."""
    sys.path.extend(path for path in paths if path not in sys.path)
