"""Layer 1 (and the worker, layer 3): staleness, buffer, generators."""
