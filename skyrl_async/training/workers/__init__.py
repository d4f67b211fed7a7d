"""The policy as processes: ranks, their actors, dispatch and recovery."""
