"""One module per surface: its routes, what clients may ask, and what they are answered."""
