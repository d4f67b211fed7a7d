"""Engines, and the client that routes and retries over them."""
