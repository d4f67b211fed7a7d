"""Shows what a run has recorded. Reads files only: it can neither hold up nor end a run."""
