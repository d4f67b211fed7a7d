"""Layer 2: the sessions of agent harnesses, as state machines without I/O: turn trees, their rows, lifetimes and keys."""
