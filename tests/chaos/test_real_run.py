"""A real run whose processes are killed one after the other: contracts 1, 2, 6, 7 and 8 hold all the same."""

from pathlib import Path

import pytest

from tests.chaos.attack import Attack
from tests.chaos.attacked_run import Role


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_survives_the_death_of_its_policy_worker_and_of_its_endpoint(tmp_path: Path) -> None:
    """``tests/cpu/test_chaos.py`` kills an engine, ``tests/cpu/test_main.py`` all of a run."""
    attack = Attack(tmp_path, seed=0, roles=(Role.worker, Role.server), kinds=("killed",))
    faults = list(attack.run(2))
    assert [fault.problems for fault in faults] == [{}, {}]
    assert all(fault.survived for fault in faults)
    assert attack.audit().problems() == {}
