"""What runs in Harbor's own Python environment; of other packages only Harbor may be imported here."""
