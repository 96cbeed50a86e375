"""The gateway's decisions: no I/O, no clock, no event loop."""
