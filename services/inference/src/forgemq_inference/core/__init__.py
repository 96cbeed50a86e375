"""Decisions of one lane: what runs, what its records say, which weights come next."""
