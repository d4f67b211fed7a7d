"""Advantages, losses, corrections, batching: pure tensor functions."""
