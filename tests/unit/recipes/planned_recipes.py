"""The recipes as `forgemq plan` plans them, and the blocks of their pages that show it.

`PYTHONPATH=.:loadtests python -m tests.unit.recipes.planned_recipes` writes the blocks again.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import configuration, document
from forgemq_launcher.display.plan_lines import plan_lines
from forgemq_launcher.plan.findings import notes, reasons
from forgemq_launcher.plan.machines import BANDWIDTH_SHARE, GPUS, UTILISATION, Machines
from forgemq_launcher.plan.report import PlanReport
from forgemq_launcher.plan.run_plan import PlannedRun, plan_of
from forgemq_trainer.plan import answer

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "deploy" / "recipes"
AGENT = "turns=12,prompt=1500,sampled=250,observed=500,task_bytes=4000"
"""The episode with which pages plan what mini-swe-agent plays."""

PAGES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-4b/maths.toml", {"gpu": "h100"}),
    ("qwen3-30b-a3b/maths.toml", {"gpu": "h200"}),
    ("minimax-m2/coding.toml", {"gpu": "h200", "nodes": 7, "episode": AGENT}),
]
"""Run files whose plan their page shows, and the machines of it."""

BLOCK = re.compile(r"```\n((?:fits|does not fit): .*?)\n```", re.DOTALL)
LEFT_OUT = re.compile(r"  [a-z-]+-v1 |  - the trainer refuses it")
"""Lines that a page does not show: topics, and a model's family, which the page says in words."""


def run_of(file: str, *overrides: str) -> RunConfiguration:
    """A recipe's run file with these overrides."""
    values = document((RECIPES / file).read_text(), overrides=overrides)
    return configuration(values, run="r", folder=ROOT)


def report_of(
    file: str, *overrides: str, gpu: str, nodes: int = 1, gpus: int = 8, episode: str = ""
) -> PlanReport:
    """What `forgemq plan` reports of a recipe on nodes of the table."""
    config = Path("deploy/recipes") / Path(file).parent / "config.json"
    machines = Machines(
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        host_bytes=GPUS[gpu].host_bytes,
        disk_bytes=GPUS[gpu].disk_bytes,
        utilisation=UTILISATION,
        bandwidth_share=BANDWIDTH_SHARE,
    )
    run = PlannedRun(
        configuration=run_of(file, *overrides),
        config=(ROOT / config).read_bytes(),
        machines=machines,
        is_budget_named=False,
        episode=episode,
    )
    plan = plan_of(run, answer)
    found = reasons(run, plan)
    return PlanReport(
        fits=not found,
        reasons=found,
        notes=notes(run, plan),
        machines=machines,
        config=str(config),
        plan=plan,
    )


def page_of(file: str) -> Path:
    """The page of a recipe's run file."""
    return (RECIPES / file).with_name("README.md")


def block_of(report: PlanReport) -> Iterator[str]:
    """The lines of a plan that a page shows."""
    return (line for line in plan_lines(report) if not LEFT_OUT.match(line))


def main() -> None:
    """Write the block of every page."""
    for file, machines in PAGES:
        block = "\n".join(block_of(report_of(file, **machines)))
        page = page_of(file)
        page.write_text(BLOCK.sub(lambda _, block=block: f"```\n{block}\n```", page.read_text()))


if __name__ == "__main__":
    main()
