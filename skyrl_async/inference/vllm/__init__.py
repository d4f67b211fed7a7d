"""All that touches vLLM."""
