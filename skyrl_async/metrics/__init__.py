"""Layer 0: where numbers go."""
