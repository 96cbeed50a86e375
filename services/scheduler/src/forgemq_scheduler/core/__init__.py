"""The scheduler's decisions, pure: who is admitted, what trains in which step, how it ends."""

from forgemq_scheduler.core.scheduler import SchedulerCore

__all__ = ["SchedulerCore"]
