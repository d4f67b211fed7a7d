"""Contracts 1, 2, 6, 7 and 8 under faults: a state machine in virtual time, and a short attack on a real run."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from skyrl_async.metrics.tracker import read_rows
from tests.chaos.attack import Attack
from tests.chaos.attacked_run import Role
from tests.chaos.audit import RECORD, audit
from tests.chaos.virtual import SETTINGS, VirtualFault, VirtualRun, attack_virtually


class ARunUnderFaults(RuleBasedStateMachine):
    """Whatever happens and when: each prompt is trained once an epoch, within the bound, with true version stamps."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.run = VirtualRun(self.directory)
        self.num_hung = 0

    @rule(fault=st.sampled_from(VirtualFault), seconds=st.floats(0.0, 10.0))
    def something_happens(self, fault: VirtualFault, seconds: float) -> None:
        self.num_hung += fault is VirtualFault.hang_sample
        self.run.happen(fault)
        self.run.go_on(seconds)

    def teardown(self) -> None:
        step = self.run.step
        self.run.happen(VirtualFault.fail_sample)  # also ends a full disk
        one_after_another = self.num_hung * (SETTINGS.rollout_timeout_s + SETTINGS.backoff.max_s)
        self.run.go_on(120.0 + one_after_another)  # they may all be tries of the group that is waited for
        found = self.run.audit()
        self.run.close()
        shutil.rmtree(self.directory)
        assert found.problems() == {}
        assert found.steps > step


TestARunUnderFaults = pytest.mark.slow(ARunUnderFaults.TestCase)
TestARunUnderFaults.settings = settings(max_examples=8, stateful_step_count=10, deadline=None)


@pytest.mark.slow
def test_a_long_run_under_hundreds_of_faults_loses_nothing(tmp_path: Path) -> None:
    found = attack_virtually(tmp_path, num_faults=300, seed=0)
    assert found.problems() == {}
    assert found.steps > 200
    assert len(list((tmp_path / "checkpoints").glob("global_step_*"))) <= 3
    assert len(read_rows(tmp_path / RECORD)) < found.trained / 2, "a resumption reads what is not final alone"


def test_the_audit_sees_what_is_wrong(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path)
    run.go_on(100.0)
    assert run.audit().problems() == {}
    run.close()
    path = tmp_path / "trained_groups.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)

    def problems(text: str) -> dict[str, int]:
        path.write_text(text)
        uids = {f"p{i}" for i in range(SETTINGS.num_prompts)}
        return audit(tmp_path, uids=uids, mini_batch_size=3, max_staleness_steps=2).problems()

    assert read_rows(path)
    assert problems("".join(lines[1:])) == {"lost": 1, "damaged_steps": 1}
    assert problems(whole + lines[0]) == {"trained_twice": 1, "damaged_steps": 1}
    assert problems(whole.replace('"trained_version": 0', '"trained_version": -1', 1))["torn_versions"] == 1
    assert problems(whole.replace('"trained_version": 0', '"trained_version": 3', 1)) == {"over_bound": 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_survives_the_death_of_an_engine(tmp_path: Path) -> None:
    """``tests/chaos/test_real_run.py`` kills its other processes."""
    attack = Attack(tmp_path, seed=0, roles=(Role.engine,), kinds=("killed",))
    (fault,) = attack.run(1)
    assert fault.survived and fault.problems == {}
    assert attack.audit().problems() == {}
