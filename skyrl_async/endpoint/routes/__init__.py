"""One module per surface: routes, bodies and replies."""
