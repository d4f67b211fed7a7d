"""Environments driven over /v1/chat/completions by the real openai client; sees layers 0-1 of skyrl_async only."""

from skyrl_gym_http.generator import SkyRLGymHTTPGenerator

__all__ = ["SkyRLGymHTTPGenerator"]
