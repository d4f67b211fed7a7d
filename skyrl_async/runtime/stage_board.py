"""All stages of a run at a glance, for the metrics, the console and the trace.

Does not know what the stages do.
"""

import asyncio
from collections.abc import Callable, Mapping

from skyrl_async.runtime.stages import OnLeft, Stage, StageState, StageStatus

STAGES = ("dataloader", "generate", "rollout", "reward", "ref_logp", "logp", "train", "param_update", "validation")
"""In the order of the data's flow; a run has those that it needs."""
_SHARES = (StageState.PROCESSING, StageState.WAITING_FOR_INPUT, StageState.WAITING_FOR_OUTPUT)
_CODES = {state: float(code) for code, state in enumerate(StageState)}


class StageBoard:
    """Makes stages, and shows them.

    Args:
        clock: seconds; None: the clock of the event loop in which the first stage is made.
        on_left: called when a stage leaves a state or an item.
    """

    def __init__(self, clock: Callable[[], float] | None = None, on_left: OnLeft = lambda *_: None) -> None:
        self._clock = clock
        self._on_left = on_left
        self._stages: dict[str, Stage] = {}
        self._seen: dict[str, Mapping[str, float]] = {}

    def stage(self, name: str) -> Stage:
        """Return the stage of this name (one of ``STAGES``); makes it on the first call."""
        assert name in STAGES, name
        if name not in self._stages:
            self._clock = self._clock or asyncio.get_running_loop().time
            self._stages[name] = Stage(name, self._clock, self._on_left)
            self._seen[name] = self._stages[name].statistics()
        return self._stages[name]

    def statuses(self) -> list[StageStatus]:
        """Return the status of each stage, in the order of the data's flow; from any thread."""
        return [self._stages[name].status() for name in STAGES if name in self._stages]

    def values(self) -> dict[str, float]:
        """Return by metric name the state of each stage, for how long, and how it spent the time since the last call."""
        values: dict[str, float] = {}
        for status in self.statuses():
            name = status.name
            before, now = self._seen[name], self._stages[name].statistics()
            self._seen[name] = now
            spent = {state: now[key] - before[key] for state in StageState if (key := f"{state.name.lower()}_seconds")}
            total = sum(spent.values())
            values |= {
                f"stage/{name}/state": _CODES[status.state],
                f"stage/{name}/seconds": status.seconds,
                f"stage/{name}/items": now["items"] - before["items"],
            }
            values |= {
                f"stage/{name}/{state.name.lower()}_frac": spent[state] / total if total else 0.0 for state in _SHARES
            }
        return values
