"""Changes the engines of a run from outside, while it trains."""
