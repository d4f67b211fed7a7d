"""Directories in shared memory: kept while their process lives, removed when it was killed."""

import multiprocessing
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from skyrl_async.composition.publishing import directory_in_memory

_FORKS = multiprocessing.get_context("fork")


def hold(root: Path, pipe: Connection) -> None:
    with directory_in_memory(root) as made:
        pipe.send(made)
        pipe.recv()


def holder(root: Path) -> tuple[BaseProcess, Connection, Path]:
    """A process with a directory."""
    ours, theirs = _FORKS.Pipe()
    process = _FORKS.Process(target=hold, args=(root, theirs))
    process.start()
    return process, ours, ours.recv()


def test_what_a_living_process_holds_stays_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    living, pipe, kept = holder(tmp_path)
    killed, _, left = holder(tmp_path)
    (left / "weights").write_text("of a version")
    killed.kill()
    killed.join()
    with directory_in_memory(tmp_path) as directory:
        assert set(tmp_path.iterdir()) == {kept, directory}
    pipe.send("end")
    living.join()
    assert living.exitcode == 0 and not list(tmp_path.iterdir())


def test_runs_that_start_together_do_not_remove_each_other_s_directories(tmp_path: Path) -> None:
    missing: list[Path] = []

    def start() -> None:
        for _ in range(100):
            with directory_in_memory(tmp_path) as directory:
                if not directory.is_dir():
                    missing.append(directory)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missing and not list(tmp_path.iterdir())
