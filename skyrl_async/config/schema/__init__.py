"""Every key of a run: the sections, and in ``run`` all of them put together."""
