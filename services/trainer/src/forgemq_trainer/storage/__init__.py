"""The trainer's files: checkpoints, and weights that engines read."""
