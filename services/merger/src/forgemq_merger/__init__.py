"""Prefix trees of scored groups."""
