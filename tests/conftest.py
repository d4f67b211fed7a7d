"""How all tests are run: by a process per core, with one of two Hypothesis profiles.

``ci`` tries few examples, the same ones each time; ``nightly`` tries many, others each time.
"""

import faulthandler
import os
from collections import Counter
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("ci", max_examples=12, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)


_PHASE_S = 400.0
"""For a test's setup, its call or its teardown: longer than the timeout of the whole test, which strikes once."""

WITH_FORKED_WORKERS = (
    "test_bad_step.py",
    "test_equal_runs.py",
    "test_main.py",
    "test_overload.py",
    "test_own_algorithms.py",
    "test_policy_workers.py",
    "test_ray_cluster.py",
    "test_ray_engine.py",
    "test_server_process.py",
    "test_sessions_end_to_end.py",
    "test_teacher_run.py",
    "test_training_ranks.py",
    "test_two_ranks.py",
)
"""A third of all CPU time of tests/cpu; a second server of workers and a second Ray would add some 10 s."""


class _FilesTogether(LoadFileScheduling):
    """The tests of a file go to one process, and all that need forked workers to the one that has started them."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "forked workers" if file.endswith(WITH_FORKED_WORKERS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Folders are run by a process per core, files by this one alone; ``-n`` says otherwise."""
    option, is_one_of_them = config.option, hasattr(config, "workerinput")
    if option.numprocesses is None and not is_one_of_them and all(os.path.isdir(argument) for argument in config.args):
        option.numprocesses, option.dist, option.loadscopereorder = min(os.cpu_count() or 1, 4), "loadfile", False
        option.maxworkerrestart = "1"  # the tests of a file in which a process ends are run anew


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, or one process would be left with them at the end."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.name not in WITH_FORKED_WORKERS, -num_slow[item.path]))


@pytest.hookimpl(wrapper=True)
def _with_end(item: pytest.Item) -> Iterator[None]:
    """A phase that the test's own timeout does not end, such as a teardown after it struck, ends the process: its threads are shown."""
    faulthandler.dump_traceback_later(_PHASE_S, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _with_end
