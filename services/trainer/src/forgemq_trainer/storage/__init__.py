"""What the trainer writes to disk: checkpoints, and weights that engines read."""
