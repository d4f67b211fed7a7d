"""A real run whose processes are killed one after the other, or frozen and interrupted: contracts 1, 2, 6, 7 and 8 hold all the same."""

import random
from pathlib import Path

import pytest

from tests.chaos.attack import BOOTING, Attack, overrides_of, write_workplace
from tests.chaos.attacked_run import AttackedRun, Role
from tests.patience import PATIENCE_S


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_survives_the_death_of_an_engine_of_its_policy_worker_and_of_its_endpoint(tmp_path: Path) -> None:
    """``tests/cpu/test_main.py`` kills all of a run."""
    attack = Attack(tmp_path, seed=0, roles=BOOTING, kinds=("killed",), generator="gym_http", interrupt_every=0)
    faults = list(attack.run(len(BOOTING)))
    assert {fault.role for fault in faults} == set(BOOTING)
    assert [fault.problems for fault in faults] == [{}] * len(BOOTING)
    assert all(fault.survived for fault in faults)
    assert attack.audit().problems() == {} and attack.unsaved_steps == 0
    assert attack.ending is not None and attack.ending.problems() == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_begins_although_processes_are_killed_while_they_come_up(tmp_path: Path) -> None:
    write_workplace(tmp_path)
    run, rng = AttackedRun(overrides_of(tmp_path, "gym"), tmp_path / "run"), random.Random(0)
    run.start()
    try:
        for role in BOOTING:
            assert run.wait(lambda role=role: run.find(role, rng) is not None, 3 * PATIENCE_S)  # type: ignore[misc]
            assert run.step == 0
            run.find(role, rng).kill()  # type: ignore[union-attr]
        assert run.wait(lambda: run.step >= 2, 8 * PATIENCE_S), run.output_path.read_text()
        run.interrupt()
        assert run.ending().problems() == {}
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_upon_a_frozen_engine_leaves_nothing_and_the_run_is_resumed(tmp_path: Path) -> None:
    """Environments are played in process, as by default."""
    attack = Attack(tmp_path, seed=0, roles=(Role.engine,), kinds=("frozen",), generator="gym", interrupt_every=1)
    (fault,) = attack.run(1)
    assert fault.is_interrupted and fault.survived and fault.problems == {}
    assert attack.ending is not None and attack.ending.problems() == {}
    assert attack.unsaved_steps == 0 and attack.audit().problems() == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_leave_with_and_without_a_warning_and_others_come(tmp_path: Path) -> None:
    attack = Attack(tmp_path, seed=1, roles=(Role.engine,), kinds=("killed",), interrupt_every=0, has_market=True)
    faults = list(attack.run(3))
    assert all(fault.survived for fault in faults) and [fault.problems for fault in faults] == [{}] * 3
    assert attack.num_traded["add"] and attack.num_traded["remove"]
    assert attack.audit().problems() == {} and attack.unsaved_steps == 0
    assert attack.ending is not None and attack.ending.problems() == {}
