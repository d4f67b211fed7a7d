"""A policy that decides how many turns it takes, small enough that every episode can be enumerated: means under it are exact.

An episode has at most three turns. In each the policy sees one of three states and stops, or takes one of two other actions, which lead to
other states or back to the same one. Each turn earns a reward of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skyrl_async.algorithms.credit import SampleCredit

Floats = NDArray[np.float64]
MAX_TURNS, STOP, LONG = 3, 0, 2
NEXT_STATE = ((0, 0, 1), (0, 1, 2), (0, 0, 2))
"""By state and action; there is none after STOP."""
REWARDS = ((0.9, 0.5, 0.2), (1.0, 0.3, 0.6), (0.7, 0.8, 0.1))
"""What a turn earns, by state and action."""


class Episode(NamedTuple):
    """States and actions by turn."""

    states: tuple[int, ...]
    actions: tuple[int, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(REWARDS[state][action] for state, action in zip(self.states, self.actions, strict=True))

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """The action LONG takes two tokens, the second of which is certain."""
        return tuple(2 if action == LONG else 1 for action in self.actions)

    @property
    def credit(self) -> SampleCredit:
        return SampleCredit(
            rewards=self.rewards, num_tokens=self.num_tokens, observations=tuple(bytes([s]) for s in self.states)
        )


def episodes(states: tuple[int, ...] = (0,), actions: tuple[int, ...] = ()) -> Iterator[Episode]:
    """Every episode that begins so."""
    for action in range(3):
        taken = (*actions, action)
        if action == STOP or len(taken) == MAX_TURNS:
            yield Episode(states, taken)
        else:
            yield from episodes((*states, NEXT_STATE[states[-1]][action]), taken)


EPISODES = tuple(episodes())


@dataclass(frozen=True)
class TurnPolicy:
    """A softmax policy over actions by state."""

    logits: Floats
    """(3, 3)."""

    @cached_property
    def chances(self) -> Floats:
        """(3, 3): of each action, by state."""
        exps = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return exps / exps.sum(1, keepdims=True)

    def chance_of(self, episode: Episode) -> float:
        return float(np.prod([self.chances[s, a] for s, a in zip(*episode, strict=True)]))

    def scores(self, episode: Episode) -> Floats:
        """(K, 9): the gradient of each turn's log-probability."""
        found = np.zeros((len(episode.states), 3, 3))
        for turn, (state, action) in enumerate(zip(*episode, strict=True)):
            found[turn, state] = -self.chances[state]
            found[turn, state, action] += 1
        return found.reshape(-1, 9)

    def gradient_of(self, value: Callable[[Episode], float]) -> Floats:
        """(9,): of the mean of ``value``."""
        total = np.zeros(9)
        for episode in EPISODES:
            total += self.chance_of(episode) * value(episode) * self.scores(episode).sum(0)
        return total

    def value(self, turn: int, state: int) -> float:
        """What is earned in the mean from this turn on."""
        return float(sum(self.chances[state, action] * self.action_value(turn, state, action) for action in range(3)))

    def action_value(self, turn: int, state: int, action: int) -> float:
        """The same once the action is known."""
        is_last = action == STOP or turn == MAX_TURNS - 1
        return REWARDS[state][action] + (0.0 if is_last else self.value(turn + 1, NEXT_STATE[state][action]))

    def token_values(self, episode: Episode) -> Floats:
        """(N,): the values of a perfect critic; after the first token of LONG the action is known."""
        found: list[float] = []
        for turn, (state, action) in enumerate(zip(*episode, strict=True)):
            found.append(self.value(turn, state))
            found += [self.action_value(turn, state, action)] * (action == LONG)
        return np.array(found)


def make_policy(seed: int) -> TurnPolicy:
    return TurnPolicy(np.random.default_rng(seed).normal(0.0, 0.7, (3, 3)))
