"""Layer 1: what an answer earns, as functions of texts."""
