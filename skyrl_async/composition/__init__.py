"""Layer 5: puts a run together from its configuration."""
