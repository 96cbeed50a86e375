"""A program that looks for secrets in its own environment and in what /proc shows of its parent.

It prints JSON: what it found of `SECRETS` by place, or why it could not look there.
"""

import json
import os
import re
import sys
from pathlib import Path

# Put together here, so that the program does not find its own text.
PATTERN = re.compile(b"s3cr3t" + b"-of-[a-z]+")

SECRETS = {
    "FORGEMQ_KAFKA_SASL_PASSWORD": "s3cr3t-of-broker",
    "FORGEMQ_AGENTS_ADMIN_KEY": "s3cr3t-of-gateway",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-blobs",
    "OTEL_EXPORTER_OTLP_HEADERS": "key=s3cr3t-of-telemetry",
}

NOTHING = {"own": [], "environ": "PermissionError", "memory": "PermissionError"}
"""What it finds if it finds nothing."""


def found(content: bytes) -> list[str]:
    return sorted({match.decode() for match in PATTERN.findall(content)})


def memory(pid: int) -> bytes:
    """What can be written of a process's memory: its heap and its stack are there."""
    parts = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as content:
        for line in maps:
            place, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            first, last = (int(number, 16) for number in place.split("-"))
            content.seek(first)
            try:
                parts.append(content.read(last - first))
            except OSError:
                continue
    return b"".join(parts)


def look(pid: int) -> dict[str, object]:
    """What is found in this process and in that one."""
    result: dict[str, object] = {"own": found(repr(os.environ).encode())}
    for name, read in (
        ("environ", lambda: Path(f"/proc/{pid}/environ").read_bytes()),
        ("memory", lambda: memory(pid)),
    ):
        try:
            result[name] = found(read())
        except OSError as error:
            result[name] = type(error).__name__
    return result


if __name__ == "__main__":
    pid = int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid()
    sys.stdout.write(json.dumps(look(pid)) + "\n")
