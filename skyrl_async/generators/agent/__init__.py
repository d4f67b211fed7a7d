"""Agent harnesses that generate samples over the endpoint, as programs or as functions."""
