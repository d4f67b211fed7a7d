"""Agent harnesses that come with the library, and the environments of their own that they run in."""
