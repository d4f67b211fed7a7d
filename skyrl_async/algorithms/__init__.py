"""Layer 1: advantages, losses, batching: pure tensor functions."""
