"""Write the files that follow from the structs: schemas, AsyncAPI, missing examples, a release.

    python -m forgemq_contracts.generate [--folder contracts] [--release TAG]

Examples are never rewritten: a record that was stored once must always decode. `--release` freezes
the present contracts as `released/<next number>.json`; the compatibility gate compares every later
change with all of them. `released/previous.toml` then names them and the tag as the release that
the code from here on is compatible with (docs/compatibility.md).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from forgemq_contracts import openapi, topics
from forgemq_contracts.asyncapi import document
from forgemq_contracts.compatibility import schemas, topic_facts
from forgemq_contracts.examples import full, minimal

FOLDER = Path(__file__).parents[2]
VERSION = "1.0.0"


def write_all(folder: Path) -> list[Path]:
    """Write every generated file below this folder; returns those that changed."""
    texts = {
        folder / "schemas.json": schemas_text(),
        folder / "asyncapi.yaml": asyncapi_text(),
        folder / "openapi.json": openapi.text(),
    }
    changed = [path for path, text in texts.items() if not _holds(path, text)]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    return changed + write_missing_examples(folder)


def schemas_text() -> str:
    """Content of `schemas.json`."""
    return _json(schemas())


def asyncapi_text() -> str:
    """Content of `asyncapi.yaml`."""
    return yaml.safe_dump(document(version=VERSION), sort_keys=False, width=100, allow_unicode=True)


def write_missing_examples(folder: Path) -> list[Path]:
    """Write the examples that do not exist yet; returns their paths."""
    written = []
    for topic in topics.ALL:
        for name, record in (("minimal", minimal(topic.record)), ("full", full(topic.record))):
            path = folder / "examples" / topic.name / f"{name}.msgpack"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(topics.encode(record))
            written.append(path)
    return written


def release(folder: Path, *, revision: str) -> Path:
    """Freeze the present contracts under the next number, as those of this tag or commit."""
    released = folder / "released"
    released.mkdir(exist_ok=True)
    number = len(list(released.glob("*.json"))) + 1
    path = released / f"{number:04d}.json"
    path.write_text(_json(frozen()), encoding="utf-8")
    (released / "previous.toml").write_text(
        f"# The release that this code is compatible with: docs/compatibility.md.\n"
        f'revision = "{revision}"\ncontracts = "{path.name}"\n',
        encoding="utf-8",
    )
    return path


def frozen() -> dict[str, Any]:
    """What a release promises: topics, the structs of records, and the gateway's HTTP API."""
    api = json.loads(openapi.text())
    return {
        "topics": topic_facts(),
        "schemas": schemas(),
        "routes": sorted(
            f"{method.upper()} {path}"
            for path, methods in api["paths"].items()
            for method in methods
        ),
        "http": api["components"]["schemas"],
    }


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=True) + "\n"


def _main() -> int:
    parser = argparse.ArgumentParser(prog="forgemq_contracts.generate", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--release", metavar="TAG", help="freeze the present contracts as its")
    arguments = parser.parse_args()
    written = write_all(arguments.folder)
    if arguments.release:
        written.append(release(arguments.folder, revision=arguments.release))
    for path in written:
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
