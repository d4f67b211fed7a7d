"""Generators: how a prompt becomes trajectories."""
