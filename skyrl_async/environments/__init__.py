"""Environments of the skyrl_gym protocol that reward by ``rewards``, by name from a row's ``env_class``."""
