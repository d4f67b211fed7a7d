"""Two runs never share a directory, however the first one ends."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_async.composition.run_directory import only_run_in
from skyrl_async.errors import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from skyrl_async.composition.run_directory import only_run_in
with only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(directory: Path) -> subprocess.Popen[str]:
    """Another process, in the directory until it is killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_a_second_run_is_refused_with_the_process_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        said = rf"in use by another run \(process {holder.pid} on \S+ since 20"
        with pytest.raises(ConfigError, match=said), only_run_in(tmp_path):
            pytest.fail("both are in it")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with only_run_in(tmp_path):
            assert f"process {os.getpid()} on " in (tmp_path / "run.lock").read_text()


def test_a_directory_is_free_again_when_its_run_has_ended_or_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), only_run_in(tmp_path):
        raise ZeroDivisionError
    with only_run_in(tmp_path), pytest.raises(ConfigError, match="in use"), only_run_in(tmp_path):
        pass
    with only_run_in(tmp_path):
        pass


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with only_run_in(tmp_path):
        pass
    assert "has no file locks (No locks available)" in caplog.text
