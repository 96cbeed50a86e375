"""Settings of processes, from the environment; needs nothing but msgspec."""
