"""The pure part of the trainer: trees, attention, log-probabilities, losses and steps."""
