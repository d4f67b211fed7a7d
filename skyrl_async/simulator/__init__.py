"""Layer 5: the real loops against modelled engines, in virtual time."""
