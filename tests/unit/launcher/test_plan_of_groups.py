"""What `forgemq plan` says of groups that would never train."""

import pytest

from forgemq_launcher.core.configuration import configuration, document
from forgemq_launcher.plan.findings import notes, reasons
from forgemq_launcher.plan.run_plan import PlannedRun, plan_of
from forgemq_trainer.plan import answer
from tests.unit.launcher.test_plan import DEMO, ROOT, TWO_H100


@pytest.mark.parametrize("episode", ["", "turns=4,prompt=158,sampled=19,observed=35"])
def test_groups_that_the_merger_would_fail_do_not_fit_and_are_noted_if_nobody_stated_them(
    episode: str,
):
    """8 episodes that share 292 of 372 tokens, or 158 of 339 as they are stated."""
    tokens = 158 + 8 * (4 * 19 + 3 * 35) if episode else 292 + 8 * 80
    for limit, is_found in ((tokens, False), (tokens - 1, True)):
        overrides = (f"trainer.tree_tokens_max={limit}",)
        run = configuration(
            document((DEMO / "run.toml").read_text(), overrides=overrides), run="r", folder=ROOT
        )
        planned = PlannedRun(
            configuration=run,
            config=(DEMO / "model" / "config.json").read_bytes(),
            machines=TWO_H100,
            is_budget_named=False,
            episode=episode,
        )
        plan = plan_of(planned, answer)
        said = f"has {tokens:,} tokens, and the merger fails one of more than trainer.tree_tokens_"
        assert any(said in reason for reason in reasons(planned, plan)) == bool(is_found * episode)
        assert any(said in note for note in notes(planned, plan)) == (is_found and not episode)
