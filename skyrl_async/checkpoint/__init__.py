"""Checkpoints of a run: their files, what they hold, and the lock on a run's directory."""
