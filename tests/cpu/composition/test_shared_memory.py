"""Directories in shared memory: kept while their process lives, removed when it was killed."""

import subprocess
import sys
import threading
from pathlib import Path

from skyrl_async.composition.publishing import directory_in_memory

HOLDS = """
import sys
from pathlib import Path
from skyrl_async.composition.publishing import directory_in_memory
with directory_in_memory(Path(sys.argv[1])) as made:
    print(made, flush=True)
    input()
"""


def holder(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_living_process_holds_stays_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    living, kept = holder(tmp_path)
    killed, left = holder(tmp_path)
    (left / "weights").write_text("of a version")
    killed.kill()
    killed.communicate()
    with directory_in_memory(tmp_path) as directory:
        assert set(tmp_path.iterdir()) == {kept, directory}
    with living:
        living.communicate("\n")
    assert living.returncode == 0 and not list(tmp_path.iterdir())


def test_runs_that_start_together_do_not_take_each_other_s_for_left_over(tmp_path: Path) -> None:
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
