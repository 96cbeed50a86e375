"""Which start of a run an end belongs to: a run that is resumed has several of both."""

from forgemq_contracts.run import EndedRun, StartedRun


def is_end_of(ended: EndedRun, started: StartedRun) -> bool:
    """Whether a run ended after this start of it, so not before a resume."""
    return ended.run == started.run and ended.ended_ms >= started.started_ms
