"""The scheduler's decisions, pure: which groups run, what trains in which step, how each ends."""

from forgemq_scheduler.core.scheduler import SchedulerCore

__all__ = ["SchedulerCore"]
