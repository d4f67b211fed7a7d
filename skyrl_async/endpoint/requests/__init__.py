"""What a request passes on its way to a completion and back, whatever the surface."""
