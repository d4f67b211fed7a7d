"""Environments played over /v1/chat/completions by the openai client, as an agent outside the trainer would."""

from skyrl_gym_http.generator import SkyRLGymHTTPGenerator

__all__ = ["SkyRLGymHTTPGenerator"]
