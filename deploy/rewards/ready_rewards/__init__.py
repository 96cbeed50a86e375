"""One agent and the rewards of three domains."""
