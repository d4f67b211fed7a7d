"""The record of a run's samples: what every finished sample was, and what became of it."""
