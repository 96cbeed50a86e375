"""Attention over a prefix tree: one interface, a backend for CPUs and two for GPUs."""
