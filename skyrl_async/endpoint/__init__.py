"""The OpenAI-compatible endpoint, which serves the policy while it trains."""
