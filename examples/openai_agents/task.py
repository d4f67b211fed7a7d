"""Questions to a shop: what an answer is worth.

Flows in: a prompt and what the agent answered. Flows out: a reward. Does not know the harness.
"""

import re

from skyrl_async.generators.agent.reward import AgentEpisode
from skyrl_async.types import Prompt

SETTINGS = {"command": "uv run --script examples/openai_agents/harness.py"}


def reward(prompt: Prompt, episode: AgentEpisode) -> float:
    """1.0 when the last number of the answer is the row's ``answer``, else 0.0."""
    numbers = re.findall(r"\d+", episode.answer)
    return float(bool(numbers) and float(numbers[-1]) == prompt.extras["answer"])  # int() refuses thousands of digits
