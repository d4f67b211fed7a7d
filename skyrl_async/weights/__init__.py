"""What both ends of a weight transfer share: memory files, shared tensors, dtypes, checksums, adapters."""
