"""The trainer as several processes: how they start, communicate, share parameters and end."""
