"""The built-in tasks, the tiny policy and its warm start."""
