"""Rules across sections and about this machine."""
