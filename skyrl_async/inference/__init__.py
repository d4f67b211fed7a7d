"""Layer 2: engines, the client that routes and retries over them, and the OpenAI-compatible endpoint."""
