"""The real loops against modelled engines, in virtual time."""
