"""Every key of a run: a file for each section, and ``run`` with all of them put together."""
