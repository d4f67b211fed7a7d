"""Layer 2: training backends and the policy workers that run them."""
