"""The run on the log: its topics, its start and end, its live state, its audit."""
