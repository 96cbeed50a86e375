"""The open files that a process shares with the `jail.py` that it starts."""

import json
import os
from contextlib import ExitStack
from typing import IO, Any


class JailPipes:
    """What this process and `jail.py` share: the configuration, the lifeline, the report."""

    def __init__(self, files_open: ExitStack, configuration: bytes) -> None:
        def opened(number: int, mode: str) -> IO[bytes]:
            file: IO[bytes] = files_open.enter_context(os.fdopen(number, mode, buffering=0))
            return file

        file = opened(os.memfd_create("configuration"), "w+b")
        file.write(configuration)
        file.seek(0)
        lifeline, self._lifeline = map(opened, os.pipe(), ("rb", "wb"))
        self._report, report = map(opened, os.pipe(), ("rb", "wb"))
        self._passed = (file, lifeline, report)

    def passed(self) -> tuple[int, ...]:
        """File numbers for the process that is started."""
        return tuple(file.fileno() for file in self._passed)

    def cut_lifeline(self) -> None:
        """Have the program killed; idempotent."""
        self._lifeline.close()

    def report(self) -> dict[str, Any]:
        """What the process, which has ended, said about the program."""
        for file in self._passed:
            file.close()
        said = self._report.read()
        report: dict[str, Any] = json.loads(said or '{"ended": "refused", "detail": "no report"}')
        return report
