"""What the agents process decides: pure functions of configuration and progress."""
