"""Live view and history of a run for people."""
