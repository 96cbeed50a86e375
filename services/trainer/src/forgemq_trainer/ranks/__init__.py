"""The trainer on several processes: how they start, talk, share parameters and end together."""
