"""The shop desk as a command line, served by mini-swe-agent, unmodified, as a user writes it."""
