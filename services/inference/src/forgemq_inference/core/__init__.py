"""Decisions of one lane: which requests run, what records say, which weights come next."""
