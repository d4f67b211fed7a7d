"""Hypothesis profiles: ``ci`` tries few examples, the same ones each time; ``nightly`` tries many, others each time."""

from hypothesis import settings

settings.register_profile("ci", max_examples=20, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
