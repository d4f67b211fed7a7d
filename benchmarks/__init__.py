"""Measurements, each ``python -m benchmarks.<name> --json FILE [--quick]``: a table for people, JSON with its conditions."""
