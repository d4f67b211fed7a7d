"""A request's way to a completion and back, for any surface."""
