"""Decisions of the agents process, without I/O."""
