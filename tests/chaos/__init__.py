"""A real run whose processes are killed and frozen at random, and what must hold afterwards: ``uv run -m tests.chaos --kills 100``."""
