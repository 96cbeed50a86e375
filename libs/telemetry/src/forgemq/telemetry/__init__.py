"""Traces, metrics and log lines with one catalogue of names."""
