"""Publishing a policy version to every engine."""
