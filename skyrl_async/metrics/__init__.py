"""Metrics, traces and logs of a run, and where they are written and shown."""
