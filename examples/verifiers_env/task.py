"""A game of guessing, which the environment's own rubric judges.

Flows in: a prompt and what the rubric said. Flows out: a reward. Does not know the rubric.
"""

import json

from skyrl_async.generators.agent.reward import AgentEpisode
from skyrl_async.types import Prompt

SETTINGS = {
    "harness": "verifiers",
    "harness_args": ["--play", "examples/verifiers_env/environment.py"],
}


def reward(prompt: Prompt, episode: AgentEpisode) -> float:
    """What the rubric gave; 0.0 for a game that a cap of the session broke off.

    The environment's program may be believed: the policy has no tool that could write its result.
    """
    return 0.0 if episode.output is None else float(json.loads(episode.output)["reward"])
