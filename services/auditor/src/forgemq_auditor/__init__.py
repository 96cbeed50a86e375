"""Compares what was trained with what was sampled, then deletes what nobody needs."""
