"""Rewards of answers, as functions of texts."""
