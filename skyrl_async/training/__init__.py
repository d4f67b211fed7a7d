"""Training: backends, the workers that run them, and what they export."""
