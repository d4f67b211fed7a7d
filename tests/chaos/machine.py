"""The virtual run as a state machine: Hypothesis chooses what happens and when, and shortens a history that breaks a promise.

Flows in: how many histories, of how many events each. Flows out: counts; or the shortest history that fails, printed, and its error.
"""

import contextlib
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.chaos.virtual import INTERRUPTS, SETTINGS, VirtualFault, VirtualRun
from tests.chaos.virtual_attack import Survivals, without_syncing

_STEPS_AFTER = SETTINGS.max_staleness_steps + 4
"""With so many more, all that was in flight at the last fault is trained."""
_PATIENCE_S = 180.0
_SLICE_S = 10.0


@dataclass(slots=True)
class Tally:
    """Over all histories, those included that Hypothesis tries while it shortens one."""

    histories: int = 0
    faults: int = 0
    survived: int = 0
    interrupted: int = 0
    saved: int = 0
    found: Counter[str] = field(default_factory=Counter)
    """Sums of what the audits say."""


class ARunUnderFaults(RuleBasedStateMachine):
    """Whatever happens and when: each prompt is trained once an epoch, within the bound, with true version stamps."""

    def __init__(self, tally: Tally | None = None) -> None:
        super().__init__()
        self._tally = tally or Tally()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(without_syncing())
        self._directory = Path(tempfile.mkdtemp())
        self._stack.callback(shutil.rmtree, self._directory)
        self._num_hung = 0

    @initialize(
        double_buffer=st.booleans(), num_engines=st.sampled_from([1, 3]), policy=st.sampled_from(["wait", "window"])
    )
    def a_run_begins(self, double_buffer: bool, num_engines: int, policy: str) -> None:
        settings = replace(SETTINGS, double_buffer=double_buffer, num_engines=num_engines, staleness_policy=policy)
        self._run = VirtualRun(self._directory, settings)
        self._stack.callback(self._run.close)
        self._survivals = Survivals(self._run)

    @rule(fault=st.sampled_from(VirtualFault), seconds=st.floats(0.0, 10.0))
    def something_happens(self, fault: VirtualFault, seconds: float) -> None:
        self._strike(fault)
        self._survivals.go_on(seconds)

    @rule(
        fault=st.sampled_from([fault for fault in VirtualFault if fault not in INTERRUPTS]),
        seconds=st.floats(0.0, 3.0),
        interrupt=st.sampled_from(INTERRUPTS),
    )
    def ctrl_c_is_pressed_upon_something(self, fault: VirtualFault, seconds: float, interrupt: VirtualFault) -> None:
        self._strike(fault)
        self._survivals.go_on(seconds)
        self._strike(interrupt)

    def _strike(self, fault: VirtualFault) -> None:
        self._num_hung += fault is VirtualFault.hang_sample
        self._survivals.strike(fault)

    def teardown(self) -> None:
        with self._stack:
            step = self._survivals.last_step
            self._run.repair_disk()
            # Samples that hang may all be tries of the group that is waited for, one after another.
            patience_s = _PATIENCE_S + self._num_hung * (SETTINGS.rollout_timeout_s + SETTINGS.max_retry_backoff_s)
            while self._survivals.last_step < step + _STEPS_AFTER and patience_s > 0:
                self._survivals.go_on(_SLICE_S)
                patience_s -= _SLICE_S
            found = self._run.audit()
            assert found.problems() == {}
            assert found.steps > step
            assert self._survivals.num_survived == self._survivals.num_faults
            self._count(asdict(found))

    def _count(self, found: dict[str, int]) -> None:
        self._tally.histories += 1
        self._tally.faults += self._survivals.num_faults
        self._tally.survived += self._survivals.num_survived
        self._tally.interrupted += self._run.num_interrupted
        self._tally.saved += self._run.num_saved
        self._tally.found.update(found)


def run_machine(tally: Tally, *, num_histories: int, num_events: int, random_seed: int) -> None:
    """Play so many histories of so many events: a fault, or a fault and Ctrl-C. Raises what the shortest one that fails ends with."""

    @seed(random_seed)
    def machine() -> ARunUnderFaults:
        return ARunUnderFaults(tally)

    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=num_events,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
