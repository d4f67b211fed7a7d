"""Puts a run together from its configuration."""
