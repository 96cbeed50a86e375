"""Brings up one run on one machine, shows it and reports it."""
