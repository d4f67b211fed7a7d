"""Engines by where they run: in Ray actors, or in this process and reproducible bit for bit."""
