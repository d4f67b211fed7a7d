"""How long the tests wait for processes, threads and engines: the machines are shared, and no wait here measures speed."""

PATIENCE_S = 60.0
"""In seconds; long enough that whatever is still awaited then hangs."""
