"""Hands out prompts one by one, and records the state of each in a ledger.

Prompts come in a seeded order, epoch after epoch. Epochs flow into one another: prompts that fill no mini-batch at the end of an epoch
begin the next epoch's first one. Several sources are mixed by weights. A weight is the number of passes over its source in an epoch: 1
takes every row once. 2 takes it twice, the second time under its own uid, ``uid~2``, so that the ledger has both. 0.25 takes a quarter of
the rows in each epoch, and every row once in four epochs, in an order drawn from the seed.
"""

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_async.data.ledger import Key, UidLedger, UidState
from skyrl_async.errors import CheckpointError, StateError
from skyrl_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Prompts of which each epoch takes a share, one share after another."""

    uids: tuple[str, ...]
    share: float
    """Fraction per epoch, in (0, 1)."""


def weighted(prompts: Sequence[Prompt], weight: float) -> tuple[tuple[Prompt, ...], Rotation | None]:
    """Return a source's prompts with the copies for ``weight``, and the rotation for its fraction.

    Args:
        prompts: all prompts of the source.
        weight: passes over them in an epoch, > 0.
    """
    rounds = [
        tuple(prompt if number == 1 else replace(prompt, uid=f"{prompt.uid}~{number}") for prompt in prompts)
        for number in range(1, math.ceil(weight) + 1)
    ]
    share = weight % 1
    rotation = Rotation(uids=tuple(prompt.uid for prompt in rounds[-1]), share=share) if share and prompts else None
    return tuple(itertools.chain.from_iterable(rounds)), rotation


class EpochPlan:
    """The uids of each epoch; every epoch has equally many.

    Args:
        uids: of the dataset, unique, copies included.
        rotations: uids of which an epoch takes a share; uids that are not in ``uids`` are ignored.
        seed: of the order of each rotation.
    """

    def __init__(self, uids: Sequence[str], rotations: Sequence[Rotation] = (), *, seed: int = 0) -> None:
        self._uids = tuple(uids)
        known = set(uids)
        self._rotations: list[tuple[list[str], int]] = []
        for index, rotation in enumerate(rotations):
            order = [uid for uid in rotation.uids if uid in known]
            random.Random(f"{seed}-{index}").shuffle(order)
            self._rotations.append((order, min(len(order), max(1, round(rotation.share * len(order))))))
        self._always = known.difference(*(order for order, _ in self._rotations))

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._always) + sum(num for _, num in self._rotations)

    @property
    def is_whole(self) -> bool:
        """Whether every epoch has every uid."""
        return not self._rotations

    def of_epoch(self, epoch: int) -> list[str]:
        """The uids of ``epoch`` (from 0), in dataset order."""
        if self.is_whole:
            return list(self._uids)
        chosen = set(self._always)
        for order, num in self._rotations:
            chosen.update(order[(epoch * num + i) % len(order)] for i in range(num))
        return [uid for uid in self._uids if uid in chosen]


class _AsyncDataloader:
    """The prompts of a run, drawn by the generation workers and marked by the trainer (SkyRL's verbs).

    Args:
        prompts: the training set; uids unique.
        seed: seed of the shuffling.
        num_epochs: number of epochs; None never ends.
        plan: prompts of each epoch; None: all of them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        num_epochs: int | None = None,
        plan: EpochPlan | None = None,
    ) -> None:
        self._prompts = {prompt.uid: prompt for prompt in prompts}
        self._content_digest = _content_digest(prompts)
        uids = [prompt.uid for prompt in prompts]
        self._plan = plan or EpochPlan(uids)
        self._ledger = UidLedger(uids, seed=seed, num_epochs=num_epochs, uids_of_epoch=self._plan.of_epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt."""
        return self._ledger.epoch

    @property
    def has_ended(self) -> bool:
        """Whether no prompt is left to be drawn."""
        return self._ledger.has_ended

    async def get_next_non_consumed_data(self) -> tuple[Key, Prompt] | None:
        """The next prompt of the seeded order with its (epoch, uid); None after the last epoch."""
        key = self._ledger.draw()
        return None if key is None else (key, self._prompts[key[1]])

    def prompt_of(self, key: Key) -> Prompt:
        """The prompt of an (epoch, uid)."""
        return self._prompts[key[1]]

    def check_running(self, keys: Collection[Key]) -> None:
        """Raise ``CheckpointError`` unless exactly these prompts are being generated."""
        running = set(self._ledger.running())
        if different := sorted(running ^ set(keys)):
            raise CheckpointError(
                f"the checkpoint's ledger and its running groups do not agree on {different[0]}, and {len(different)} in all: "
                "resume from another one"
            )

    async def mark_finished_uid(self, key: Key) -> None:
        """The group is generated and can be trained."""
        self._ledger.mark(key, UidState.FINISHED)

    async def mark_consumed_uids(self, keys: Sequence[Key]) -> None:
        """An optimizer step with these groups is complete."""
        for key in keys:
            self._ledger.mark(key, UidState.TRAINED)

    async def mark_filtered_uids(self, keys: Sequence[Key]) -> None:
        """These finished groups are not trained on purpose."""
        for key in keys:
            self._ledger.mark(key, UidState.FILTERED)

    async def mark_failed_uid(self, key: Key) -> None:
        """The rollouts failed for good in this epoch."""
        self._ledger.mark(key, UidState.FAILED)

    async def requeue(self, key: Key) -> None:
        """The prompt is the next to be drawn."""
        self._ledger.requeue(key)

    def get_consumed_uids_list(self, epoch: int | None = None) -> list[str]:
        """The uids trained in an open epoch, by default the current one. For SkyRL's callers."""
        return self._ledger.uids(self.epoch if epoch is None else epoch, UidState.TRAINED)

    async def reset_at_epoch_end(self) -> None:
        """Raise ``StateError`` if an older epoch is open. For SkyRL's callers: epochs flow into one another, and nothing needs a reset."""
        stale = [epoch for epoch in self._ledger.open_epochs if epoch < self.epoch - 1]
        if stale:
            raise StateError(f"epochs {stale} still have prompts that are neither trained, filtered nor failed")

    def state_for_checkpoint(self) -> dict[str, Any]:
        """JSON of the ledger, a digest of the dataset's uids and mixture, and a digest of its rows' contents."""
        return {
            "dataset_digest": self._digest(),
            "content_digest": self._content_digest,
            "num_prompts": len(self._prompts),
            "ledger": self._ledger.to_json(),
        }

    async def load_state_from_checkpoint(self, saved: dict[str, Any]) -> None:
        """Continue from ``state_for_checkpoint``. Raises ``CheckpointError`` for another dataset or seed."""
        try:
            if saved["dataset_digest"] != self._digest():
                raise CheckpointError(
                    f"the checkpoint was made with {saved['num_prompts']} other prompts (this run has {len(self._prompts)}): "
                    "resume with the same task.* values and files"
                )
            if saved["content_digest"] != self._content_digest:
                raise CheckpointError(
                    "the checkpoint was made with prompts of the same uids and other contents (messages, env_class or another column): "
                    "resume with the same task.* values and files, or begin another run"
                )
            self._ledger.load_json(saved["ledger"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"in the checkpoint's trainer_state.json, dataloader holds no ledger of this version ({error!r}); resume from another "
                "one, or with the version of skyrl_async that wrote it"
            ) from error

    def statistics(self) -> dict[str, float]:
        """Prompts per state over the open epochs, and totals over the run."""
        return {name: float(count) for name, count in self._ledger.counts().items()}

    def _digest(self) -> str:
        mixed = () if self._plan.is_whole else ("", *self._plan.of_epoch(0))
        return hashlib.sha256("\n".join((*self._prompts, *mixed)).encode()).hexdigest()[:16]


def _content_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of the prompts' contents in their order; the same in every process."""
    digest = hashlib.sha256()
    for prompt in prompts:
        content = prompt.uid, prompt.messages, prompt.env_class, prompt.extras
        try:
            written = json.dumps(content, sort_keys=True, default=_as_text)
        except TypeError:  # keys that have no order, or are no text
            written = json.dumps(content, skipkeys=True, default=_as_text)
        digest.update(f"{written}\n".encode())
    return digest.hexdigest()[:16]


def _as_text(value: object) -> str | list[str]:
    """The value as JSON, without what differs from process to process: addresses, and the order of a set."""
    if isinstance(value, set | frozenset):
        return sorted(repr(item) for item in value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
