"""Programs of harnesses that are libraries. They run in the harness's environment, and import nothing of this package."""
