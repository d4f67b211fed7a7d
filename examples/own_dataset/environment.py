"""An environment of one's own, named by its path: ``examples.own_dataset.environment:ReverseWordEnv``.

Flows in: the columns of a row as ``extras``, then what the policy says. Flows out: the reward. One turn, so nothing is observed.
"""

from itertools import takewhile
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class ReverseWordEnv(BaseTextEnv):
    """The policy has to write ``extras["word"]`` backwards; the reward is the share of letters right before the first wrong one."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        word: str = (extras or {})["word"]
        self.right = word[::-1]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Reward the answer and end the episode."""
        said = action.strip().lower()
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, self.right, strict=False)))
        reward = num_right / max(len(said), len(self.right))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={}, postprocessed_action=None)
