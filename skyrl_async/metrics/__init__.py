"""Where numbers go."""
