"""Layer 1 and 2: the built-in tasks, the tiny policy and its warm start."""
