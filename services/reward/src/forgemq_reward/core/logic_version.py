"""Which logic the reward core has; a higher one takes over the runs of a lower one."""

LOGIC_VERSION = 4
"""Raise it by one with every change of what the core writes, or keeps, for inputs it got before.

A restart then takes journalled inputs over instead of comparing outputs: CONTRIBUTING.md, "Change a
core". A journal keeps the number, so it never goes down.
"""

SNAPSHOTS_SINCE = 2
"""The lowest logic version whose core goes on from this one's snapshots.

A build of it may follow a clean stop of this one. Raise it to LOGIC_VERSION if an older core would
misread a snapshot, or lack a field of it that matters: docs/compatibility.md, "Go back".
"""
