"""Weights on their way out of training: staged copies, broadcast files, Hugging Face directories."""
