"""Which document `forgemq eval` takes its domain from: a file, the model's own run, or none."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forgemq_contracts.environments import environment_of
from forgemq_launcher.asked_run import document_in
from forgemq_launcher.core.configuration import (
    NAME_CHARACTERS_MAX,
    ConfigurationError,
    Document,
    overridden,
)
from forgemq_launcher.core.judging import domain_alone, domain_of, domains_in, judging
from forgemq_launcher.model_folder import check_model_files, own_settings
from forgemq_launcher.run_folder import RunFolder

DEFAULT_NAME = "model"
"""Begins the id of an evaluation whose document has no name."""

FILE = "run.toml"
CONFIGURATION = "configuration.json"


def judged_document(options: argparse.Namespace) -> tuple[Document, str]:
    """The document of the evaluation that the arguments ask for, and where its domain is from.

    Raises:
        ConfigurationError: naming the argument or key, and the rule.
    """
    check_model_files(Path(options.model))
    values, source = _asked_document(options)
    try:
        return judging(values, model=options.model, domain=domain_of(options.domain)), source
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _asked_document(options: argparse.Namespace) -> tuple[Document, str]:
    path: Path | None = options.file
    if path is not None:
        return document_in(path, options.overrides), str(path)
    looked = []
    if environment_of(options.domain) is None:
        for path in _places(Path(options.model)):
            values = _document_at(path)
            if options.domain in domains_in(values):
                return overridden(values, options.overrides), str(path)
            looked.append(str(path))
    return _document_alone(options, looked=looked), "key=value"


def _document_alone(options: argparse.Namespace, *, looked: list[str]) -> Document:
    """The document of a domain that only the arguments describe."""
    domain = domain_of(options.domain)
    values = domain_alone(options.domain, model=own_settings(Path(options.model)))
    is_described = any(each.startswith("queues.") for each in options.overrides)
    if "agent" not in values["queues"][0] and not is_described:
        without = f"; {', '.join(looked)} has no such domain" if looked else ""
        raise ConfigurationError(
            f"--domain: nothing says what domain {domain!r} is{without}: name a run's FILE, or "
            f"give its agent, tasks and rewards as queues.{domain}.agent=module:function and so on"
        )
    return overridden(values, options.overrides)


def _places(model: Path) -> Iterator[Path]:
    """Files that may describe the domains of this model, nearest first."""
    folder = model.absolute()
    for parent in folder.parents:
        if (parent / CONFIGURATION).is_file() and (parent / "checkpoints").is_dir():
            yield parent / CONFIGURATION
    for path in dict.fromkeys((folder.parent / FILE, Path.cwd() / FILE)):
        if path.is_file():
            yield path


def _document_at(path: Path) -> Document:
    if path.name != CONFIGURATION:
        return document_in(path, [])
    configuration = RunFolder(path.parent).configuration()
    values: Document = msgspec.json.decode(msgspec.json.encode(configuration))
    return {**values, "run": configuration.run[:NAME_CHARACTERS_MAX]}
