"""Hostile programs, in real processes: contained, ended in time, and said what became of them."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_async.errors import GenerationError
from skyrl_async.rewards import confinement, sandbox
from skyrl_async.rewards.sandbox import Limits, Outcome, call_function, run_program

pytestmark = pytest.mark.skipif(not confinement.is_supported(), reason="needs Linux on x86_64 or aarch64")

SHORT = Limits(cpu_s=1, wall_s=0.5, memory_mb=256, output_kb=16)
PATIENT = Limits(cpu_s=1, wall_s=120.0, memory_mb=256, output_kb=16)


def run(source: str, limits: Limits = PATIENT, stdin: str = "") -> Outcome:
    return run_program(source, stdin=stdin, limits=limits)


def test_a_program_reads_its_input_and_its_output_is_returned() -> None:
    outcome = run(
        "import sys\nprint(input()[::-1], len(sys.stdin.read()))\nprint('hm', file=sys.stderr)", stdin="abc\nde\n"
    )
    assert (outcome.output, outcome.error, outcome.failure) == ("cba 3\n", "hm\n", None)


@pytest.mark.parametrize("path", ["/dev/stdin", "/proc/self/fd/0"])
def test_a_program_may_open_its_input_by_name_and_not_write_to_it(path: str) -> None:
    assert run(f"print(open({path!r}).read())", stdin="abc").output == "abc\n"
    if has_landlock():
        assert "PermissionError" in str(run(f"open({path!r}, 'w')", stdin="abc").failure)


def test_what_a_program_defines_is_found_by_the_name_of_its_module() -> None:
    source = "import pickle\nclass Point: x = 3\nprint(pickle.loads(pickle.dumps(Point())).x)"
    assert run(source).output == "3\n"


def test_a_program_that_waits_for_more_input_than_there_is_gets_an_end_of_file() -> None:
    assert "EOFError" in str(run("input()\ninput()", stdin="one\n").failure)


@pytest.mark.slow
def test_an_endless_loop_is_ended_by_its_cpu_time_and_a_sleeper_by_the_deadline() -> None:
    assert run("while True: pass").failure == "used more than 1 s of CPU time"
    assert run("import time\ntime.sleep(1000)", SHORT).failure == "ran longer than 0.5 s"


@pytest.mark.slow
def test_a_program_that_ignores_every_signal_is_ended_too() -> None:
    source = (
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    )
    assert run(f"{source}time.sleep(1000)", SHORT).failure == "ran longer than 0.5 s"
    assert run(f"{source}while True: pass").failure == "used more than 1 s of CPU time"


def test_a_fork_bomb_makes_no_second_process() -> None:
    bomb = run("import os\nwhile True: os.fork()")
    assert "BlockingIOError" in str(bomb.failure)
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'open(\"child\", \"w\")'])"
    assert "BlockingIOError" in str(run(child).failure)
    assert "Error" in str(run("import os\nos.posix_spawn('/bin/true', ['true'], {})").failure)


@pytest.mark.slow
def test_threads_work_and_a_bomb_of_them_ends() -> None:
    one = "import threading\nt = threading.Thread(target=print, args=('in a thread',))\nt.start()\nt.join()"
    assert run(one).output == "in a thread\n"
    bomb = run("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()", SHORT)
    assert bomb.failure is not None


def test_memory_is_limited() -> None:
    assert "MemoryError" in str(run("x = []\nwhile True: x.append(bytes(10**7))").failure)


def test_too_much_output_is_cut_and_named_in_the_failure() -> None:
    for stream in ("stdout", "stderr"):
        outcome = run(f"import sys\nwhile True: print('y' * 100, file=sys.{stream})")
        assert outcome.failure is not None
        assert len(outcome.output) <= 16 * 1024 and len(outcome.error) <= 16 * 1024
    assert run("import sys\nwhile True: print('y' * 100)").failure == "wrote more than 16 KiB"


def test_no_socket_can_be_opened_not_even_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        assert "PermissionError" in str(outcome.failure)
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "PermissionError" in str(run("import socket\nsocket.socket(socket.AF_UNIX)").failure)


@pytest.mark.slow
def test_no_other_process_can_be_signalled_or_traced() -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for call in (f"os.kill({victim.pid}, 9)", f"os.kill({os.getpid()}, 0)", "os.kill(-1, 9)", "os.killpg(0, 9)"):
            assert "PermissionError" in str(run(f"import os\n{call}").failure), call
        assert victim.poll() is None
    finally:
        victim.communicate(b"\n")
    assert run("import os\nos.kill(os.getpid(), 15)").failure == "died of SIGTERM"


def has_landlock() -> bool:
    return "without" not in subprocess.run(
        [sys.executable, "-c", "from skyrl_async.rewards.confinement import restrict_files as r; print('' if r('/tmp') else 'without')"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    ).stdout  # fmt: skip


@pytest.mark.slow
def test_files_elsewhere_can_be_neither_read_nor_written(tmp_path: Path) -> None:
    if not has_landlock():
        pytest.skip("this kernel has no Landlock")
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    for call in (
        f"open({str(secret)!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.listdir({str(tmp_path)!r})",
    ):
        assert "PermissionError" in str(run(f"import os\n{call}").failure), call
    for call in (f"os.unlink({str(secret)!r})", f"os.chmod({str(secret)!r}, 0)", f"os.mkdir({str(tmp_path / 'd')!r})"):
        assert "PermissionError" in str(run(f"import os\n{call}").failure), call
    assert secret.read_text() == "42"
    assert "PermissionError" in str(run("open(f'/proc/{__import__(\"os\").getppid()}/environ').read()").failure)


def test_the_working_directory_is_its_own_and_gone_afterwards() -> None:
    outcome = run("import os\nprint(open('program.py').read(6), os.listdir(), os.getcwd())")
    text, _, directory = outcome.output.strip().rpartition(" ")
    assert text == "import ['program.py']"
    assert not Path(directory).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "open('a', 'w')",
        "open('program.py', 'r+')",
        "os.truncate('program.py', 1 << 40)",
        "os.open('.', os.O_TMPFILE | os.O_RDWR)",
        "os.mkdir('d')",
        "os.mkfifo('f')",
        "os.symlink('program.py', 's')",
        "os.link('program.py', 'l')",
        "os.rename('program.py', 'a')",
        "open('/dev/shm/a', 'w')",
        "open('/tmp/a', 'w')",
    ],
)
def test_a_program_can_put_nothing_on_the_disk(call: str) -> None:
    if not has_landlock():
        pytest.skip("this kernel has no Landlock")
    outcome = run(f"import os\ntry: {call}\nexcept OSError as error: print(error.strerror)\nprint(os.listdir())")
    refusals = ("Permission denied", "Operation not permitted", "Invalid cross-device link", "File too large")
    assert outcome.failure is None and outcome.output.splitlines()[0] in refusals
    assert outcome.output.splitlines()[1] == "['program.py']"


def test_the_environment_of_the_run_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    assert "SECRET" not in run("import os\nprint(os.environ)").output


@pytest.mark.parametrize(
    ("source", "failure"),
    [
        ("def f(:", "SyntaxError"),
        ("raise ValueError('no')", "exit code 1: ValueError: no"),
        ("import sys\nsys.exit(3)", "exit code 3"),
        ("import os\nos.abort()", "died of SIGABRT"),
        ("import os\nos.kill(os.getpid(), 40)", "died of signal 40"),
        ("import os\nos.setuid(12345)", "PermissionError"),
    ],
)
def test_the_failure_names_any_other_end(source: str, failure: str) -> None:
    assert failure in str(run(source).failure)


def test_what_a_program_returns_is_computed_by_it() -> None:
    outcome, results = call_function("def add(a, b):\n  print('noise')\n  return a + b", "add", [[1, 2], ["a", "b"]])
    assert results == [3, "ab"] and outcome.error == "noise\nnoise\n"
    assert call_function("import os\nos.write(1, b'[1]')\nos._exit(0)", "f", [[1], [2]])[1] is None


@pytest.mark.parametrize("junk", ["'[' * 200000", "'9' * 5000", "'[{' * 1000", "'\\x00'", "'null'"])
def test_what_is_no_list_of_results_is_none(junk: str) -> None:
    source = f"import os\nfor fd in range(3, 64):\n  try: os.write(fd, ({junk}).encode())\n  except OSError: pass\nos._exit(0)"
    assert call_function(source, "f", [[1]])[1] is None


async def test_a_hanging_program_in_a_thread_does_not_hold_up_the_event_loop() -> None:
    hanging = asyncio.create_task(asyncio.to_thread(run, "import time\ntime.sleep(1000)", SHORT))
    num_turns = 0
    while not hanging.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert (await hanging).failure == "ran longer than 0.5 s" and num_turns >= 10


def test_a_sandbox_that_cannot_be_set_up_is_an_error_and_no_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "confinement.py"
    broken.write_text("raise SystemExit('no seccomp here')")
    monkeypatch.setattr(sandbox.confinement, "__file__", str(broken))
    with pytest.raises(GenerationError, match=r"could not be set up .* no seccomp here"):
        run("print(1)")


def test_a_program_that_ends_early_costs_no_waiting() -> None:
    started = time.monotonic()
    run("print(1)")
    assert time.monotonic() - started < PATIENT.wall_s / 2
