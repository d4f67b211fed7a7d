"""Several sources with weights: which prompts an epoch has.

A weight is the number of passes over its source in an epoch. 1 takes every row once. 2 takes it twice: the second time under a uid
of its own, ``uid~2``, so that the ledger keeps account of both. 0.25 takes a quarter of the rows, the next quarter in the next
epoch, and every row once in four epochs, in an order drawn from the seed.

Flows in: prompts per source, weights, a seed. Flows out: the prompts with their copies, and the uids of each epoch. This module
does not know files or the ledger.
"""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from skyrl_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Prompts of which each epoch takes only a share, in turn."""

    uids: tuple[str, ...]
    share: float
    """In (0, 1)."""


def weighted(prompts: Sequence[Prompt], weight: float) -> tuple[tuple[Prompt, ...], Rotation | None]:
    """Return the prompts of a source with the copies that ``weight`` asks for, and what of them takes turns.

    Args:
        prompts: of the source.
        weight: passes over it in an epoch, > 0.
    """
    num_whole = math.floor(weight)
    copies = [prompt for number in range(1, num_whole + 1) for prompt in _copies(prompts, number)]
    share = weight - num_whole
    if share == 0 or not prompts:
        return tuple(copies), None
    last = _copies(prompts, num_whole + 1)
    return (*copies, *last), Rotation(uids=tuple(prompt.uid for prompt in last), share=share)


class EpochPlan:
    """The uids of each epoch; every epoch has equally many.

    Args:
        uids: of the dataset, unique, copies included.
        rotations: those of which an epoch takes a share; uids that are not in ``uids`` are passed over.
        seed: of the order in which they take turns.
    """

    def __init__(self, uids: Sequence[str], rotations: Sequence[Rotation] = (), *, seed: int = 0) -> None:
        self._uids = tuple(uids)
        known = set(uids)
        self._turns = [_turns(rotation, known, f"{seed}-{index}") for index, rotation in enumerate(rotations)]
        in_turn = {uid for order, _ in self._turns for uid in order}
        self._always = frozenset(known - in_turn)

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._always) + sum(num for _, num in self._turns)

    @property
    def is_whole(self) -> bool:
        """Every epoch has every uid."""
        return not self._turns

    def of_epoch(self, epoch: int) -> list[str]:
        """The uids of ``epoch`` (from 0), in dataset order."""
        chosen = set(self._always)
        for order, num in self._turns:
            chosen.update(order[(epoch * num + i) % len(order)] for i in range(num))
        return [uid for uid in self._uids if uid in chosen]


def _copies(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    return list(prompts) if number == 1 else [replace(prompt, uid=f"{prompt.uid}~{number}") for prompt in prompts]


def _turns(rotation: Rotation, known: Collection[str], seed: str) -> tuple[list[str], int]:
    """The order in which uids take turns, and how many do in an epoch: one at least."""
    order = [uid for uid in rotation.uids if uid in known]
    random.Random(seed).shuffle(order)
    return order, min(len(order), max(1, round(rotation.share * len(order))))
