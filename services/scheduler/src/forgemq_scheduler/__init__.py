"""Windowed FIFO, staleness bound and admission."""
