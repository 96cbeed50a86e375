"""Tree training, checkpoints and new weights."""
