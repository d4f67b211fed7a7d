"""The OpenAI-compatible endpoint: a FastAPI application, one router module per surface, and what serves it."""
