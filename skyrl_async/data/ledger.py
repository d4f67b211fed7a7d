"""The state of every prompt of every open epoch: a state machine without I/O (contract 1).

new ──draw──> running ──finish──> finished ──train──> trained
 ^               │                   └──filter──> filtered
 └───requeue─────┴──fail──> failed
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from skyrl_async.errors import CheckpointError, StateError

Key = tuple[int, str]
"""(epoch, uid)"""


class UidState(StrEnum):
    """State of a prompt in one epoch."""

    NEW = "new"
    RUNNING = "running"
    FINISHED = "finished"
    """All samples of its group are generated."""
    TRAINED = "trained"
    """An optimizer step with its group is complete."""
    FILTERED = "filtered"
    """Its group is not trained on purpose."""
    FAILED = "failed"
    """Its retries are used up; it is drawn again in the next epoch."""


_CLOSED = (UidState.TRAINED, UidState.FILTERED, UidState.FAILED)
_OPEN = (UidState.NEW, UidState.RUNNING, UidState.FINISHED)

_FROM = {
    UidState.NEW: (UidState.RUNNING, UidState.FINISHED),
    UidState.FINISHED: (UidState.RUNNING,),
    UidState.FAILED: (UidState.RUNNING,),
    UidState.TRAINED: (UidState.FINISHED,),
    UidState.FILTERED: (UidState.FINISHED,),
}


class UidLedger:
    """Draws uids in a seeded order per epoch, one epoch after another, and records the state of each.

    Args:
        uids: of the dataset, unique and not empty.
        seed: epoch e is shuffled with ``random.Random(f"{seed}-{e}")``.
        num_epochs: number of epochs; None never ends.
        uids_of_epoch: epoch -> its uids in dataset order, at least one; None: every epoch has all.
    """

    def __init__(
        self,
        uids: Sequence[str],
        *,
        seed: int,
        num_epochs: int | None,
        uids_of_epoch: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        if not uids or len(set(uids)) != len(uids):
            raise ValueError(
                f"expected at least one uid and no duplicates, got {len(uids)} with {len(set(uids))} distinct"
            )
        self._uids = tuple(uids)
        self._uids_of_epoch = uids_of_epoch or (lambda epoch: self._uids)
        self._seed = seed
        self._num_epochs = num_epochs
        self._states: dict[int, dict[str, UidState]] = {}
        self._queue: deque[Key] = deque()
        self._next_epoch = 0
        self._totals: Counter[UidState] = Counter()
        self._num_of_state: dict[int, Counter[UidState]] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next uid."""
        return self._queue[0][0] if self._queue else self._next_epoch

    @property
    def has_ended(self) -> bool:
        """Whether no uid is left to be drawn."""
        return not self._queue and self._num_epochs is not None and self._next_epoch >= self._num_epochs

    def draw(self) -> Key | None:
        """The next new uid, now running; None after the last epoch."""
        if self.has_ended:
            return None
        if not self._queue:
            self._next_epoch += 1
            self._open_epoch(self._next_epoch - 1, {})
        epoch, uid = self._queue.popleft()
        self._set((epoch, uid), UidState.RUNNING)
        return epoch, uid

    def requeue(self, key: Key) -> None:
        """A running or finished uid becomes new, and the next to be drawn."""
        self.mark(key, UidState.NEW)
        self._queue.appendleft(key)

    def mark(self, key: Key, to: UidState) -> None:
        """Move the uid to state ``to``. Raises ``StateError`` if the drawing above has no such arrow."""
        found, epoch = self.state(key), key[0]
        if found not in _FROM[to]:
            raise StateError(f"uid {key[1]!r} of epoch {epoch} is {found.value} and cannot become {to.value}")
        self._set(key, to)
        if to in _CLOSED:
            self._totals[to] += 1
            num_of_state = self._num_of_state[epoch]
            if not any(num_of_state[state] for state in _OPEN):
                del self._states[epoch], self._num_of_state[epoch]

    def state(self, key: Key) -> UidState:
        """State of the uid in its epoch. Raises ``StateError`` for a complete epoch, whose uids are forgotten."""
        epoch, uid = key
        if epoch not in self._states or uid not in self._states[epoch]:
            raise StateError(f"uid {uid!r} of epoch {epoch} is not in the ledger (unknown, or its epoch is complete)")
        return self._states[epoch][uid]

    def uids(self, epoch: int, state: UidState) -> list[str]:
        """The uids of an open epoch in one state, in dataset order."""
        return [uid for uid, s in self._states.get(epoch, {}).items() if s is state]

    @property
    def open_epochs(self) -> tuple[int, ...]:
        """Started epochs with a uid that is not trained, filtered or failed."""
        return tuple(self._states)

    def running(self) -> list[Key]:
        """Every running (epoch, uid)."""
        return [(epoch, uid) for epoch in self._states for uid in self.uids(epoch, UidState.RUNNING)]

    def counts(self) -> dict[str, int]:
        """Uids per state over the open epochs, and ``*_total`` over the run for the closed states."""
        counts = {state.value: sum(now[state] for now in self._num_of_state.values()) for state in UidState}
        return counts | {f"{state.value}_total": self._totals[state] for state in _CLOSED}

    def to_json(self) -> dict[str, Any]:
        """State for a checkpoint; uids in none of its lists are new."""
        kept = (*_CLOSED, UidState.FINISHED, UidState.RUNNING)
        epochs = {str(epoch): {state.value: self.uids(epoch, state) for state in kept} for epoch in self._states}
        totals = {state.value: self._totals[state] for state in _CLOSED}
        return {"seed": self._seed, "next_epoch": self._next_epoch, "epochs": epochs, "totals": totals}

    def load_json(self, saved: dict[str, Any]) -> None:
        """Continue from ``to_json``; running uids stay running. Raises ``CheckpointError`` that names an unknown uid or another seed."""
        if saved["seed"] != self._seed:
            raise CheckpointError(
                f"the checkpoint was shuffled with trainer.seed={saved['seed']}, this run has {self._seed}"
            )
        self._next_epoch = saved["next_epoch"]
        self._totals = Counter({UidState(name): count for name, count in saved["totals"].items()})
        self._states, self._num_of_state, self._queue = {}, {}, deque()
        for epoch in sorted(int(e) for e in saved["epochs"]):
            self._open_epoch(epoch, saved["epochs"][str(epoch)])

    def _open_epoch(self, epoch: int, uids_by_state: Mapping[str, Sequence[str]]) -> None:
        """Queue the epoch's uids in its order; those of ``uids_by_state`` are in these states instead."""
        states = dict.fromkeys(self._uids_of_epoch(epoch), UidState.NEW)
        for name, uids in uids_by_state.items():
            unknown = [uid for uid in uids if uid not in states]
            if unknown:
                raise CheckpointError(
                    f"the checkpoint holds uid {unknown[0]!r}, which the dataset lacks: resume with the same data"
                )
            states |= dict.fromkeys(uids, UidState(name))
        self._states[epoch] = states
        self._num_of_state[epoch] = Counter(states.values())
        order = list(states)
        random.Random(f"{self._seed}-{epoch}").shuffle(order)
        self._queue.extend((epoch, uid) for uid in order if states[uid] is UidState.NEW)

    def _set(self, key: Key, to: UidState) -> None:
        epoch, uid = key
        self._num_of_state[epoch][self._states[epoch][uid]] -= 1
        self._num_of_state[epoch][to] += 1
        self._states[epoch][uid] = to
