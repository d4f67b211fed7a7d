"""What an answer earns, as functions of texts."""
