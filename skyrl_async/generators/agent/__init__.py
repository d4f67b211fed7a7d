"""Agent harnesses that play a sample over the endpoint, as programs or as functions."""
