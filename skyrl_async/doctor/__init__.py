"""Says where the log-probs of engine and trainer part, and what explains it, from what a run has recorded."""
