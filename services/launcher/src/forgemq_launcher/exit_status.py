"""Exit statuses of `forgemq`. 0, 1 and 2 mean what they mean for every service."""

OK = 0
"""Done; after a run or an audit: every guarantee held."""
FAILED = 1
"""Tried and failed, or a guarantee did not hold, or there are dead letters."""
REFUSED = 2
"""Refused before anything was done: arguments, settings, or inputs that are gone."""
INTERRUPTED = 130
"""Stopped by a signal: 128 plus SIGINT's number, as shells report it."""
