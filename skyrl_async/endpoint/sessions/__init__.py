"""Sessions: the token-exact tree of turns of one sample, and its training rows."""
