"""Harnesses by themselves: functions and programs, with real processes and no endpoint.

Programs that shall not end read from a pipe into which nobody writes; they say that they run by writing into another.
"""

import asyncio
import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from skyrl_async.config.schema.generator import AgentAnswer, GeneratorConfig
from skyrl_async.data.dataset import load_sources
from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.generators.agent.command import CommandHarness, with_absolute_files
from skyrl_async.generators.agent.harness import AgentFunction, AgentResult, AgentTask, FunctionHarness, shown_extras
from skyrl_async.generators.agent.processes import kill_agent, marked_processes
from skyrl_async.generators.agent.settings import check_agent_settings
from skyrl_async.harnesses.install import PythonPackages
from skyrl_async.harnesses.shipped import ShippedHarness, Transcript, shipped_harness
from skyrl_async.types import SamplingParams
from tests.patience import PATIENCE_S


def a_task(tmp_path: Path, **fields: Any) -> AgentTask:
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    return AgentTask(
        **{
            "uid": "p",
            "messages": ({"role": "user", "content": "hellö"},),
            "extras": {"depth": [3]},
            "base_url": "http://127.0.0.1:1/v1",
            "api_key": "sk-of-the-session",
            "model": "policy",
            "max_model_len": 1000,
            "working_dir": working_dir,
            "sample_index": 2,
            "is_evaluation": False,
            "sampling": SamplingParams(max_tokens=5),
            **fields,
        }
    )


async def answer_text(task: AgentTask) -> str:
    return f"{task.uid} {task.sample_index}"


async def give_reward(task: AgentTask) -> int:
    return 1


async def count_with_numpy(task: AgentTask) -> Any:
    return (np.array([1, 2]) == np.array([1, 3])).sum()


async def give_result(task: AgentTask) -> AgentResult:
    return AgentResult(output="o", reward=0.5, metrics={"m": 1.0})


async def give_nothing(task: AgentTask) -> None:
    pass


async def give_list(task: AgentTask) -> list[int]:
    return [1]


async def leave(task: AgentTask) -> None:
    sys.exit(3)


async def leave_in_a_task(task: AgentTask) -> None:
    await asyncio.gather(leave(task))


async def await_what_it_cancelled(task: AgentTask) -> None:
    own = asyncio.ensure_future(asyncio.sleep(9))
    own.cancel()
    await own


def block(task: AgentTask) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (answer_text, AgentResult(output="p 2")),
        (give_reward, AgentResult(reward=1.0)),
        (count_with_numpy, AgentResult(reward=1.0)),
        (give_result, AgentResult(output="o", reward=0.5, metrics={"m": 1.0})),
        (give_nothing, AgentResult()),
    ],
)
async def test_a_function_returns_a_result_a_reward_an_answer_or_nothing(
    tmp_path: Path, function: AgentFunction, result: AgentResult
) -> None:
    assert await FunctionHarness(function).run(a_task(tmp_path)) == result


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (give_list, r"test_harness:give_list must return an AgentResult, a reward, a string or None, got \[1\]"),
        (leave, "test_harness:leave exited with status 3"),
        (leave_in_a_task, "test_harness:leave_in_a_task exited with status 3"),
        (await_what_it_cancelled, "test_harness:await_what_it_cancelled was cancelled from inside, not by the trainer"),
        (block, "test_harness:block must be an async function, but returned 1.0 at once"),
    ],
)
async def test_a_function_that_does_something_else_fails_by_name(tmp_path: Path, function: Any, complaint: str) -> None:
    with pytest.raises(GenerationError, match=complaint):
        await FunctionHarness(function).run(a_task(tmp_path))


def test_hidden_columns_are_not_shown_at_any_depth() -> None:
    extras = {
        "reward_spec": {"ground_truth": "7"},
        "tools": [{"name": "look", "answer": "7"}],
        "nested": {"extra_info": {"solution": "7"}, "kept": 1},
        "_private": "7",
        "signs": {"1": 2},
    }
    shown = shown_extras(extras)
    assert shown == {"tools": [{"name": "look"}], "nested": {"kept": 1}, "signs": {"1": 2}}
    shown["signs"]["1"] = 9
    assert extras["signs"] == {"1": 2}


async def test_files_that_other_rows_of_a_parquet_file_have_are_not_written(tmp_path: Path) -> None:
    rows = [{"uid": uid, "prompt": "fix", "files": {f"{uid}.py": "print()\n"}} for uid in ("a", "b")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    ((prompt, _),) = load_sources([tmp_path / "rows.parquet"], None, needs_environment=False)
    harness = ShippedHarness(
        name="ls",
        packages=PythonPackages(requirements=("ls==1",)),
        wire="/v1/chat/completions",
        command="ls",
        read=lambda output: Transcript(answer=output),
        check=(),
    )
    result = await shipped_harness(harness, tmp_path).run(a_task(tmp_path, extras=prompt.extras))
    assert result.output == "a.py"


def test_a_task_does_not_show_its_key(tmp_path: Path) -> None:
    assert "sk-of-the-session" not in repr(a_task(tmp_path))


async def test_a_program_finds_its_session_and_its_task_and_may_leave_an_answer(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        """
import json, os, sys
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["SKYRL_TASK_FILE"]))
names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"]
found = {"task": task, "cwd": os.getcwd(), "env": [os.environ[name] for name in names]}
json.dump({"output": json.dumps(found)}, open(os.environ["SKYRL_RESULT_FILE"], "w"))
"""
    )
    task = a_task(tmp_path)
    result = await CommandHarness(f"{sys.executable} agent.py", launch_dir=tmp_path).run(task)
    found = json.loads(result.output or "")
    assert found["task"] == {
        "uid": "p",
        "messages": [{"role": "user", "content": "hellö"}],
        "extras": {"depth": [3]},
        "sample_index": 2,
        "is_evaluation": False,
    }
    assert found["cwd"] == str(task.working_dir)
    url, key = "http://127.0.0.1:1", "sk-of-the-session"
    assert found["env"] == [f"{url}/v1", key, "policy", url, key]


RESULT = """echo '{"output": "7"}' > $SKYRL_RESULT_FILE"""


@pytest.mark.parametrize(
    ("command", "unless_told", "told"),
    [
        ("echo thinking; echo 42", None, "thinking\n42"),
        ("echo thinking >&2; printf '\\n 42 \\n\\n'", None, "42"),
        ("true", None, ""),
        (f"echo thinking; {RESULT}", "7", "7"),
    ],
)
async def test_what_a_program_prints_is_its_answer_where_the_run_says_so(
    command: str, unless_told: str | None, told: str, tmp_path: Path
) -> None:
    for folder, answer, expected in ((1, AgentAnswer.last_message, unless_told), (2, AgentAnswer.stdout, told)):
        (tmp_path / str(folder)).mkdir()
        result = await CommandHarness(command, answer=answer).run(a_task(tmp_path / str(folder)))
        assert result.output == expected


async def test_an_answer_that_is_printed_has_a_limit(tmp_path: Path) -> None:
    harness = CommandHarness("head -c 17000000 /dev/zero", answer=AgentAnswer.stdout)
    with pytest.raises(GenerationError, match="may print at most 16 MiB, got 17000000 bytes"):
        await harness.run(a_task(tmp_path))


async def test_a_programs_environment_holds_none_of_this_process_s_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "OPENAI_API_KEY", "SKYRL_CONTROLLER_KEY", "HTTPS_PROXY", "OPENAI_ORG_ID"):
        monkeypatch.setenv(name, "the-secret")
    monkeypatch.setenv("AGENT_TOOLS", "bash")
    monkeypatch.setenv("PYTHONPATH", "lib")
    task = a_task(tmp_path)
    await CommandHarness("env > found").run(task)
    found = (task.working_dir / "found").read_text()
    assert "the-secret" not in found
    variables = dict(line.split("=", 1) for line in found.splitlines())
    assert variables["AGENT_TOOLS"] == "bash"
    python, _, path = variables["PATH"].partition(os.pathsep)
    assert python == str(Path(sys.executable).parent)
    assert path == os.environ["PATH"]
    assert variables["PYTHONPATH"] == str(Path.cwd() / "lib")


async def test_a_command_may_use_its_environment_as_in_any_shell(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    await CommandHarness('cd .. && echo "openai/$OPENAI_MODEL" > found').run(task)
    assert (tmp_path / "found").read_text() == "openai/policy\n"


def test_files_of_a_command_are_found_where_the_run_was_started(tmp_path: Path) -> None:
    for name in ("agent.py", "run", "README.md", "bin/tool"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert with_absolute_files("python -u agent.py run", tmp_path) == f"python -u {tmp_path}/agent.py run"
    assert with_absolute_files("bin/tool --x=1 'README.md'", tmp_path) == f"{tmp_path}/bin/tool --x=1 'README.md'"
    assert with_absolute_files("./run && other.py", tmp_path) == f"{tmp_path}/run && other.py"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("echo why >&2; exit 3", "ended with status 3 and wrote:\nwhy$"),
        ("echo on stdout; exit 1", "ended with status 1 and wrote:\non stdout$"),
        ("exit 1", "ended with status 1 and wrote nothing"),
        ("echo $OPENAI_API_KEY >&2; exit 1", "wrote:\n<key>$"),
        ("no-such-agent", "status 127 .*not found.* and wrote:\n.*no-such-agent"),
        ("kill -9 $$", "ended by signal 9"),
        ("seq 1000 >&2; exit 1", r"wrote:\n986\n(.*\n)*1000$"),
        ("echo no json > $SKYRL_RESULT_FILE", """must hold JSON, {"output": "..."}, got 'no json\\\\n': Expecting"""),
        (
            "echo 0.7 > $SKYRL_RESULT_FILE",
            "must hold .*, got 0.7; rewards are given by the task, or by generator.reward",
        ),
        ("echo '[1]' > $SKYRL_RESULT_FILE", r'must hold \{"output": "..."\}, got \[1\]'),
        ("""echo '{"output": 1}' > $SKYRL_RESULT_FILE""", "must hold .*, got {'output': 1}"),
        ("mkfifo $SKYRL_RESULT_FILE", "must be a file of at most 16 MiB"),
        ("ln -s /dev/zero $SKYRL_RESULT_FILE", "must be a file of at most 16 MiB"),
        ("rm .skyrl/stderr.log; mkfifo .skyrl/stderr.log; exit 2", "status 2 and wrote nothing"),
    ],
)
async def test_the_error_of_a_failed_program_has_the_end_of_its_output(
    tmp_path: Path, command: str, complaint: str
) -> None:
    with pytest.raises(GenerationError, match=complaint):
        await CommandHarness(command).run(a_task(tmp_path))


async def test_a_program_cannot_reward_itself(tmp_path: Path) -> None:
    command = """echo '{"output": "7", "reward": 1.0}' > $SKYRL_RESULT_FILE"""
    assert await CommandHarness(command).run(a_task(tmp_path)) == AgentResult(output="7")


class Processes:
    """Pipes to programs: one that they write their ids into, one that they wait for."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: list[int] = []
        self._ready = directory / "ready"
        self._never = directory / "never"
        for name, path in (("AGENT_READY", self._ready), ("AGENT_NEVER", self._never)):
            os.mkfifo(path)
            monkeypatch.setenv(name, str(path))

    async def started(self, count: int) -> list[int]:
        """Waits until ``count`` programs run; returns descriptors that are readable once they are dead."""
        with os.fdopen(os.open(self._ready, os.O_RDWR)) as ready:
            self.pids = [int(await asyncio.to_thread(ready.readline)) for _ in range(count)]
        return [os.pidfd_open(pid) for pid in self.pids]


@contextmanager
def all_dead_afterwards(descriptors: list[int]) -> Iterator[None]:
    assert not select.select(descriptors, [], [], 0)[0]
    yield
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 5)[0], "the process lives"
        os.close(descriptor)


BLOCK = 'echo $$ > "$AGENT_READY"; read line < "$AGENT_NEVER"'
FAMILY = f"setsid sh -c '{BLOCK}' & sh -c '{BLOCK}; :' & (setsid sh -c '{BLOCK}' &) ; {BLOCK}"
"""A child in a session of its own, one in the agent's, an orphan, and the agent itself."""


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave the group are found on Linux only")
async def test_cancellation_kills_a_program_and_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, task = Processes(tmp_path, monkeypatch), a_task(tmp_path)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(CommandHarness(FAMILY).run(task), name="agent")
        with all_dead_afterwards(await processes.started(4)):
            running.cancel()
            await asyncio.wait({running})
    assert running.cancelled()
    assert not list(marked_processes(f"SKYRL_TASK_FILE={task.working_dir}/.skyrl/task.json"))


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave the group are found on Linux only")
@pytest.mark.parametrize("status", [0, 4])
async def test_processes_that_a_program_leaves_are_killed_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    processes = Processes(tmp_path, monkeypatch)
    os.mkfifo(tmp_path / "end")
    monkeypatch.setenv("AGENT_END", str(tmp_path / "end"))
    command = f"(setsid sh -c '{BLOCK}' &) ; sh -c '{BLOCK}; :' & read line < $AGENT_END; exit {status}"
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outcome(CommandHarness(command), a_task(tmp_path)), name="agent")
        with all_dead_afterwards(await processes.started(2)):
            await asyncio.to_thread((tmp_path / "end").write_text, "\n")
            assert (await running is None) == (status == 0)


async def test_the_event_loop_goes_on_while_an_agents_processes_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def look(group_id: int | None, mark: str) -> int:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(PATIENCE_S)
        return kill_agent(group_id, mark)

    monkeypatch.setattr("skyrl_async.generators.agent.command.kill_agent", look)
    async with asyncio.timeout(PATIENCE_S / 2), asyncio.TaskGroup() as group:
        running = group.create_task(CommandHarness("true").run(a_task(tmp_path)), name="agent")
        await begun.wait()
        assert not running.done()
        may_end.set()


async def outcome(harness: CommandHarness, task: AgentTask) -> GenerationError | None:
    try:
        await harness.run(task)
    except GenerationError as error:
        return error
    return None


HERE = "tests.cpu.generators.test_harness"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"command": "  "}, "generator.command must be a command line, got '  '"),
        ({"command": "echo 'x"}, "generator.command must be a command line for /bin/sh, got .*nterminated"),
        ({"command": "no-such-agent --now"}, "must begin with a program that can be found, got 'no-such-agent'"),
        ({"entrypoint": "nothing"}, "generator.entrypoint must be package.module:function, got 'nothing'"),
        ({"entrypoint": "no.such.module:run"}, "='no.such.module:run' cannot be imported: No module named 'no'"),
        ({"entrypoint": f"{HERE}:missing"}, "cannot be imported: module '.*test_harness' has no attribute 'missing'"),
        ({"entrypoint": f"{HERE}:HERE"}, "test_harness:HERE' must be a function, got str"),
        ({"entrypoint": f"{HERE}:block"}, "must be an async function with generator.kind=agent, got .*:block"),
        ({"command": "true", "reward": "math:tau"}, "generator.reward='math:tau' must be a function, got float"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_agent_settings(GeneratorConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"command": "MODEL=$OPENAI_MODEL agent"},
        {"command": "cd / && no-such-agent"},
        {"entrypoint": f"{HERE}:answer_text", "reward": "math:exp"},
    ],
)
def test_settings_that_may_work_pass(settings: dict[str, str]) -> None:
    check_agent_settings(GeneratorConfig(**settings))


@pytest.fixture
def launch_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run is started: with a script, a program, and a file that nobody may execute."""
    monkeypatch.chdir(tmp_path)
    for name, mode in (("agent.py", 0o755), ("agent", 0o755), ("bin/plain.sh", 0o644)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=mode)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("python missing.py", "a script that exists, got 'missing.py' (in LAUNCH_DIR)"),
        ("A=1 B='2' python3 -u bin/missing.py --x=1", "got 'bin/missing.py' (in"),
        ("uv run --script missing.py", "got 'missing.py' (in"),
        ("uv run missing.py", "got 'missing.py' (in"),
        ("env A=1 bash -e ./missing.sh|tee log", "got './missing.sh' (in"),
        ("python /nowhere/agent.py; true", "got '/nowhere/agent.py'"),
        ("python ~/no-such-agent.py", "got '~/no-such-agent.py'"),
        ("python 'agent.py'", "a script where agents find it, got 'agent.py': they run in directories of their own"),
        ("python agent", "give its absolute path, LAUNCH_DIR/agent"),
        ("./missing --now", "begin with a program that can be found, got './missing'"),
        ("bin/plain.sh", "begin with a program that may be executed, got 'bin/plain.sh': chmod +x"),
        ("./bin", "begin with a program that can be found, got './bin'"),
        ("python -u -m no_such_agent.cli --now", "a module that python finds, got 'no_such_agent'"),
    ],
)
def test_a_script_that_no_agent_would_find_is_refused_by_the_path_that_was_typed(
    launch_dir: Path, command: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match="^generator.command must ") as refused:
        check_agent_settings(GeneratorConfig(command=command))
    assert complaint.replace("LAUNCH_DIR", str(launch_dir)) in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        "python agent.py --out missing.json",
        "./agent.py missing.py",
        "agent.py",
        "bash bin/plain.sh",
        "cd bin && python missing.py",
        "true || python missing.py",
        "python -c 'import this' missing.py",
        "python $AGENT/missing.py",
        "uv run https://example.org/agent.py",
        "bash -c 'python missing.py'",
        "python -m json.tool missing.py",
        "cat <<END\nit's\nEND",
    ],
)
def test_a_command_whose_files_are_there_or_may_be_passes(launch_dir: Path, command: str) -> None:
    check_agent_settings(GeneratorConfig(command=command))


def test_programs_are_looked_for_where_agents_find_them(launch_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(launch_dir / "bin"))
    check_agent_settings(GeneratorConfig(command=f"{Path(sys.executable).name} agent.py"))
    (launch_dir / "lib" / "my_agent").mkdir(parents=True)
    (launch_dir / "lib" / "my_agent" / "__main__.py").touch()
    monkeypatch.setenv("PYTHONPATH", "lib")
    check_agent_settings(GeneratorConfig(command="python -m my_agent"))


def test_a_module_is_not_refused_where_its_python_takes_too_long_to_say_whether_it_is_there(
    launch_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(launch_dir / "never")
    (launch_dir / "python").write_text(f"#!/bin/sh\nexec cat {launch_dir / 'never'}\n")
    (launch_dir / "python").chmod(0o755)
    monkeypatch.setattr("skyrl_async.generators.agent.settings._CHECK_TIMEOUT_S", 0.2)
    check_agent_settings(GeneratorConfig(command="./python -m my_agent"))


def test_a_program_given_as_a_module_is_named_where_it_exits_while_it_is_imported(
    launch_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (launch_dir / "exiting_agent.py").write_text("import sys; sys.exit('usage: exiting_agent TASK')")
    monkeypatch.syspath_prepend(launch_dir)
    with pytest.raises(ConfigError, match="generator.entrypoint='exiting_agent:run' cannot be imported: usage"):
        check_agent_settings(GeneratorConfig(entrypoint="exiting_agent:run"))


@pytest.mark.parametrize(
    ("directory", "complaint"), [("file/agents", "Not a directory"), ("/proc/nope", "No such file"), ("/proc", "/proc")]
)
def test_a_working_directory_that_cannot_be_used_is_refused(launch_dir: Path, directory: str, complaint: str) -> None:
    (launch_dir / "file").touch()
    with pytest.raises(ConfigError, match=f"generator.working_dir must be a directory .*, got .*: .*{complaint}"):
        check_agent_settings(GeneratorConfig(command="true", working_dir=directory))


async def test_functions_run_on_a_loop_of_their_own_that_they_share(tmp_path: Path) -> None:
    loops = []

    async def note(task: AgentTask) -> None:
        loops.append(asyncio.get_running_loop())

    task = a_task(tmp_path)
    await FunctionHarness(note).run(task)
    await FunctionHarness(note).run(task)
    assert loops[0] is loops[1] and loops[0] is not asyncio.get_running_loop()


async def test_a_function_is_cancelled_with_its_sample(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def stall(task: AgentTask) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.ensure_future(FunctionHarness(stall).run(a_task(tmp_path)))
    assert await asyncio.to_thread(begun.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_harness_is_closed_once_its_cancelled_function_has_released_what_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    async def hold(task: AgentTask) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(may_end.wait, 10)
            ended.set()

    harness = FunctionHarness(hold)
    running = asyncio.ensure_future(harness.run(a_task(tmp_path)))
    assert await asyncio.to_thread(begun.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await harness.close(timeout_s=0.0)
    assert "some calls of tests.cpu.generators.test_harness:" in caplog.text
    may_end.set()
    await harness.close()
    assert ended.is_set()
