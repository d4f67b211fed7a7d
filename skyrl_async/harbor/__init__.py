"""Harbor's tasks as a dataset, and Harbor's trials as samples."""
