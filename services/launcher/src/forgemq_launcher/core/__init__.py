"""Decisions of the launcher without I/O: the configuration of a run, and when to restart."""
