"""Hands out prompts one by one, and remembers in a ledger what became of each.

Flows in: prompts, and what happened to their groups. Flows out: prompts in a seeded order, epoch after epoch, without a seam
between them: the prompts that fill no mini-batch at an epoch's end lead the next epoch's first one. Does not know groups'
contents, versions or the trainer.
"""

import hashlib
import json
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_async.data.ledger import Key, UidLedger, UidState
from skyrl_async.errors import CheckpointError, StateError
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


class _AsyncDataloader:
    """The prompts of a run, drawn by the generation workers and marked by the trainer (SkyRL's verbs).

    Args:
        prompts: the training set; uids unique.
        seed: of the shuffling.
        num_epochs: passes; None never ends.
        plan: which prompts an epoch has; None: all of them.
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
        self._plan = plan or EpochPlan(tuple(self._prompts))
        uids_of_epoch = None if self._plan.is_whole else self._plan.of_epoch
        self._ledger = UidLedger(
            [prompt.uid for prompt in prompts], seed=seed, num_epochs=num_epochs, uids_of_epoch=uids_of_epoch
        )

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._plan)

    @property
    def epoch(self) -> int:
        """The epoch prompts are drawn from."""
        return self._ledger.epoch

    async def get_next_non_consumed_data(self) -> tuple[Key, Prompt] | None:
        """The next prompt of the seeded order with its (epoch, uid); None after the last epoch."""
        key = self._ledger.draw()
        return None if key is None else (key, self._prompts[key[1]])

    def prompt_of(self, key: Key) -> Prompt:
        """The prompt of an (epoch, uid)."""
        return self._prompts[key[1]]

    def check_running(self, keys: Collection[Key]) -> None:
        """Raise ``CheckpointError`` unless exactly these are being generated."""
        running = set(self._ledger.running())
        if different := sorted(running ^ set(keys)):
            raise CheckpointError(
                f"the checkpoint's ledger and its running groups do not agree on {different[0]}, and {len(different)} in all: "
                "resume from another one"
            )

    async def mark_finished_uid(self, key: Key) -> None:
        """Its group is generated and waits to be trained."""
        self._ledger.finish(key)

    async def mark_consumed_uids(self, keys: Sequence[Key]) -> None:
        """An optimizer step with their groups is complete."""
        for key in keys:
            self._ledger.train(key)

    async def mark_filtered_uids(self, keys: Sequence[Key]) -> None:
        """Their finished groups are left out of training on purpose."""
        for key in keys:
            self._ledger.filter(key)

    async def mark_failed_uid(self, key: Key) -> None:
        """Its rollouts failed for good in this epoch."""
        self._ledger.fail(key)

    async def requeue(self, key: Key) -> None:
        """It was not generated after all: the next to be drawn."""
        self._ledger.requeue(key)

    def get_consumed_uids_list(self, epoch: int | None = None) -> list[str]:
        """The uids trained in an open epoch (by default the one drawn from)."""
        return self._ledger.uids(self.epoch if epoch is None else epoch, UidState.TRAINED)

    async def reset_at_epoch_end(self) -> None:
        """Kept for SkyRL's callers: epochs flow into one another, so nothing is to be reset; checks that none is left open."""
        stale = [epoch for epoch in self._ledger.open_epochs if epoch < self.epoch - 1]
        if stale:
            raise StateError(f"epochs {stale} still have prompts that are neither trained, filtered nor failed")

    def state_for_checkpoint(self) -> dict[str, Any]:
        """JSON of the ledger, with a digest of the dataset's uids and of how its sources are mixed, and one of what its rows hold."""
        return {
            "dataset_digest": self._digest(),
            "content_digest": self._content_digest,
            "num_prompts": len(self._prompts),
            "ledger": self._ledger.to_json(),
        }

    async def load_state_from_checkpoint(self, saved: dict[str, Any]) -> None:
        """Continue where ``state_for_checkpoint`` was taken. Raises ``CheckpointError`` for another dataset or seed.

        Checkpoints of older versions have no digest of what rows hold: of them only the uids are compared.
        """
        try:
            self._load_state(saved)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"in the checkpoint's trainer_state.json, dataloader holds no ledger of this version ({error!r}); resume from another "
                "one, or with the version of skyrl_async that wrote it"
            ) from error

    def _load_state(self, saved: dict[str, Any]) -> None:
        if saved["dataset_digest"] != self._digest():
            raise CheckpointError(
                f"the checkpoint was made with {saved['num_prompts']} other prompts (this run has {len(self._prompts)}): "
                "resume with the same task.* values and files"
            )
        if saved.get("content_digest", self._content_digest) != self._content_digest:
            raise CheckpointError(
                "the checkpoint was made with prompts of the same uids and other contents (messages, env_class or another column): "
                "resume with the same task.* values and files, or begin another run"
            )
        try:
            self._ledger.load_json(saved["ledger"])
        except StateError as error:
            raise CheckpointError(str(error)) from error

    def statistics(self) -> dict[str, float]:
        """Prompts per state over the open epochs, and totals over the run."""
        return {name: float(count) for name, count in self._ledger.counts().items()}

    def _digest(self) -> str:
        mixed = () if self._plan.is_whole else ("", *self._plan.of_epoch(0))
        return hashlib.sha256("\n".join((*self._prompts, *mixed)).encode()).hexdigest()[:16]


def _content_digest(prompts: Sequence[Prompt]) -> str:
    """Of all that prompts hold, in their order; the same in every process."""
    digest = hashlib.sha256()
    for prompt in prompts:
        content = prompt.uid, prompt.messages, prompt.env_class, prompt.extras
        try:
            written = json.dumps(content, sort_keys=True, default=_as_text)
        except TypeError:  # keys that have no order, or are no text
            written = json.dumps(content, skipkeys=True, default=_as_text)
        digest.update(f"{written}\n".encode())
    return digest.hexdigest()[:16]


def _as_text(value: object) -> str:
    """Without what differs from process to process: an object that says nothing of itself says where it lies."""
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)
