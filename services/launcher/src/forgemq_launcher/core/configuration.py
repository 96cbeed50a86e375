"""A run's configuration from its TOML file and `key=value` overrides.

Keys are dotted paths: `trainer.steps=10`, `queues.0.slots=3` or, by domain,
`queues.shop_desk.slots=3`. Values are TOML; a value that is not TOML is taken as text.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar

import msgspec

from forgemq_contracts.environments import environment_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.run_changes import check_changes
from forgemq_contracts.run_rules import check
from forgemq_launcher.core.known_keys import kinds_of, meant, unknown_key
from forgemq_launcher.core.pattern_words import in_words
from forgemq_settings.fixed_words import fixed_words

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*?)`(?: - at `(?P<path>.*)`)?$")
_RULE = re.compile(r"^(?P<rule>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)

NAME_CHARACTERS_MAX = 32
"""Of a name that begins run ids, which have 40: the rest is for `-eval` and the run's number."""
_NAME = re.compile(rf"[a-z0-9-]{{1,{NAME_CHARACTERS_MAX}}}")

Document: TypeAlias = dict[str, Any]
"""A TOML document, unchecked; `configuration` checks it against RunConfiguration."""
Part = TypeVar("Part", bound=msgspec.Struct)
TomlValue: TypeAlias = object


class ConfigurationError(Exception):
    """The run's file or an override cannot be used; the text names the key and the rule."""


def document(text: str, *, overrides: Sequence[str]) -> Document:
    """The TOML document with the overrides put in.

    Raises:
        ConfigurationError: not TOML, or an override that is not `key=value` or names nothing.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"not a TOML file: {error}") from error
    return overridden(values, overrides)


def overridden(values: Document, overrides: Sequence[str]) -> Document:
    """The same document, with the overrides put in.

    Raises:
        ConfigurationError: an override that is not `key=value`, or names nothing.
    """
    for override in overrides:
        _override(values, override)
    return values


def configuration(values: Document, *, run: str, folder: PurePath) -> RunConfiguration:
    """The checked configuration.

    Args:
        values: As from `document`.
        run: The run's id.
        folder: Absolute; relative paths of model, head, tasks and code start there.

    Raises:
        ConfigurationError: naming the key and the rule.
    """
    try:
        parsed = msgspec.convert(
            {**_with_agents_outside(values), "run": run}, RunConfiguration, strict=True
        )
        # Structs that records have too pass over fields of a later release.
        if unknown := unknown_key(values):
            raise ConfigurationError(f"{unknown}: no such key{meant(unknown)}")
        check(parsed)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_explained(str(error))) from error
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    code_paths = tuple(str(folder / path) for path in parsed.code_paths)
    pool, speculation = parsed.pool, parsed.speculation
    return msgspec.structs.replace(
        parsed,
        model=_with_paths(parsed.model, "path", folder=folder),
        queues=tuple(
            _with_paths(queue, "task_file", "held_out_file", folder=folder)
            for queue in parsed.queues
        ),
        code_paths=code_paths,
        pool=pool and _with_paths(pool, "folder", folder=folder),
        speculation=speculation and _with_paths(speculation, "head", "model", folder=folder),
    )


def _with_paths(part: Part, *names: str, folder: PurePath) -> Part:
    """The part of a configuration with these paths of it absolute; an empty one stays empty."""
    paths = {name: getattr(part, name) for name in names}
    found = {name: str(folder / path) for name, path in paths.items() if path}
    return msgspec.structs.replace(part, **found)


def changed(
    was: RunConfiguration, overrides: Sequence[str], *, folder: PurePath
) -> RunConfiguration:
    """The configuration of a run that is resumed with these overrides.

    Raises:
        ConfigurationError: naming the key and the rule, or why the field must stay.
    """
    values = overridden(msgspec.json.decode(msgspec.json.encode(was)), overrides)
    now = configuration(values, run=str(values["run"]), folder=folder)
    try:
        check_changes(was, now)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return now


def name_of(values: Document, *, default: str) -> str:
    """The name that the file gives the run, else the default.

    Raises:
        ConfigurationError: it cannot begin a run id.
    """
    name = values.get("run", default)
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise ConfigurationError(
            f"run: up to {NAME_CHARACTERS_MAX} of a-z, 0-9 and -, got {name!r}"
        )
    return name


def names_budget(values: Document) -> bool:
    """Whether the document says how much memory the trainer may take."""
    trainer = values.get("trainer")
    return isinstance(trainer, dict) and "memory_budget_bytes" in trainer


def next_run(name: str, *, taken: Sequence[str]) -> str:
    """`<name>-<n>` with the lowest n above all taken ones, from 1."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    numbers = [int(match[1]) for match in map(pattern.fullmatch, taken) if match]
    return f"{name}-{max(numbers, default=0) + 1}"


def _with_agents_outside(values: Document) -> Document:
    """The document with `agent` and `task_source` of "" in queues that name neither.

    A queue with a file of tasks, or an environment as its agent, needs no `task_source` either.
    A supervised one needs no agent.
    """
    queues = values.get("queues")
    if not isinstance(queues, list):
        return values
    outside = {"agent": "", "task_source": ""}

    def filled(queue: TomlValue) -> TomlValue:
        if not isinstance(queue, dict):
            return queue
        agent, has_tasks = queue.get("agent"), "task_file" in queue
        is_environment = isinstance(agent, str) and environment_of(agent) is not None
        if (has_tasks and "supervised" not in queue) or is_environment:
            return {"task_source": "", **queue}
        return queue if outside.keys() & queue else {**outside, **queue}

    return {**values, "queues": [filled(queue) for queue in queues]}


def _override(values: Document, override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigurationError(f"{override!r}: an override is written key=value")
    _put(values, key.strip(), _value(value.strip()))


def _value(text: str) -> TomlValue:
    try:
        value: TomlValue = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value


def _put(values: Document, key: str, value: TomlValue) -> None:
    *parents, last = key.split(".")
    at: TomlValue = values
    for depth, part in enumerate(parents):
        if isinstance(at, dict):
            at = at.setdefault(part, {})
        else:
            at = _element(at, part, key=".".join(parents[: depth + 1]))
    if not isinstance(at, dict):
        raise ConfigurationError(f"{key}: {'.'.join(parents)} is no table")
    at[last] = value


def _element(at: TomlValue, part: str, *, key: str) -> TomlValue:
    """An element of an array of tables, by index or by its domain."""
    if not isinstance(at, list):
        raise ConfigurationError(f"{key}: leads through a value that is no table")
    for index, element in enumerate(at):
        if part == str(index) or (isinstance(element, dict) and element.get("domain") == part):
            return element
    names = [element.get("domain", "?") for element in at if isinstance(element, dict)]
    raise ConfigurationError(f"{key}: no such element; there are {', '.join(names)}")


def _explained(text: str) -> str:
    """A decoding error as `key: rule`, with the nearest known key for an unknown one."""
    unknown = _UNKNOWN.match(text)
    if unknown:
        key = _dotted(unknown["path"] or "$", unknown["field"])
        return f"{key}: no such key{meant(key)}"
    missing = re.match(r"^Object missing required field `(.*?)`(?: - at `(.*)`)?$", text)
    if missing:
        return f"{_dotted(missing[2] or '$', missing[1])}: must be given"
    rule = _RULE.match(text)
    if rule and rule["path"]:
        key = _dotted(rule["path"])
        said = in_words(rule["rule"])
        words = _words_of(key) if said.startswith("Invalid enum value") else ()
        return f"{key}: {said}" + (f"; must be one of {', '.join(words)}" if words else "")
    return text


def _dotted(path: str, *fields: str) -> str:
    parts = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", path).removeprefix("$").strip(".")
    return ".".join(part for part in (parts, *fields) if part)


def _words_of(key: str) -> tuple[str, ...]:
    """The fixed words that a key may have; () if it may have others."""
    return tuple(word for kind in kinds_of(key) for word in fixed_words(kind))
