"""Decisions of the launcher without I/O: a run's configuration, restarts, GPUs, giving up."""
