"""Layer 3: publishing a policy version to every engine."""
