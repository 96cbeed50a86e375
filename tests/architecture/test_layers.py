"""The layers between packages, and that no package is left out of them."""

import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]


def linted() -> dict:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return configuration["tool"]["importlinter"]


def contracts() -> list[dict]:
    return linted()["contracts"]


@pytest.mark.timeout(120)
def test_the_layers_are_kept():
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, "run `lint-imports` to see which import"


def test_no_import_is_ignored_and_every_service_is_independent():
    assert len(contracts()) >= 4
    assert [c["name"] for c in contracts() if c.get("ignore_imports")] == []
    independent = next(c for c in contracts() if c["type"] == "independence")
    services = {f"forgemq_{path.name}" for path in (ROOT / "services").iterdir() if path.is_dir()}
    assert set(independent["modules"]) == services


def test_every_package_is_searched_for_circles_of_imports():
    packages = {path.name for path in ROOT.glob("*/*/src/forgemq_*")} | {"forgemq_contracts"}
    acyclic = next(c for c in contracts() if c["type"] == "acyclic_siblings")
    assert set(acyclic["ancestors"]) == set(linted()["root_packages"]) == packages
