"""The engines of a run, listed and changed from another thread over its control socket; real engines, without a trainer."""

import asyncio
import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from skyrl_async.composition.control import CONTROL_FILE, controlled
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.engines.__main__ import ask, main
from skyrl_async.errors import ConfigError, InferenceError
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.inference.fleet import Fleet
from skyrl_async.inference.protocol import InferenceEngine
from tests.cpu.tiny_run import build_policy, make_client


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Path]:
    policy_dir = build_policy(tmp_path / "policy")
    client, _ = make_client(policy_dir)

    starting = asyncio.Barrier(2)

    async def start(name: str) -> InferenceEngine:
        await starting.wait()  # until another one is started beside it
        return DeterministicEngine(name, policy_dir, max_model_len=256)

    fleet = Fleet(client, start=start, config=EngineConfig(), say=lambda line: None)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    async with (
        fleet.supervising(),
        controlled(run_dir, fleet, lambda: {engine.name: {"lag_steps": 2.0} for engine in client.engines}),
    ):
        yield run_dir


async def test_engines_are_listed_added_and_removed_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path) as run_dir:
        (only,) = await asyncio.to_thread(ask, run_dir, action="list")
        assert only == {
            "name": "engine-0",
            "state": "serving",
            "serving": "engine-0",
            "restarts": 0,
            "lag_steps": 2.0,
        }
        assert await asyncio.to_thread(main, [str(run_dir), "add", "2"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
            "engine-0",
            "engine-1",
            "engine-2",
        ]
        assert await asyncio.to_thread(main, [str(run_dir), "remove", "engine-0", "--json"]) == 0
        assert [engine["name"] for engine in json.loads(capsys.readouterr().out)] == ["engine-1", "engine-2"]
        with pytest.raises(
            InferenceError, match="there is no engine 'engine-7' to remove; there are engine-1, engine-2"
        ):
            await asyncio.to_thread(ask, run_dir, action="remove", name="engine-7")


async def test_what_is_no_request_is_refused_and_what_fails_in_the_run_is_said_as_it_is(tmp_path: Path) -> None:
    failures = [KeyError("GPU"), ConnectionResetError("another machine")]

    class Failing:
        async def add_engine(self) -> str:
            raise failures.pop(0)

    def said(line: bytes) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(json.loads((tmp_path / CONTROL_FILE).read_text())["socket"])
            connection.sendall(line)
            return str(json.loads(connection.makefile().readline())["error"])

    async with controlled(tmp_path, cast(Fleet, Failing()), dict):
        for line, error in (
            (b'{"action": "fly"}\n', "a request's action is list, add, or remove with a name, got {'action': 'fly'}"),
            (b'{"action": "remove"}\n', "a request's action is list, add, or remove with a name"),
            (b"list\n", "a request is a line of JSON with an action, got b'list"),
            (b"[" * 50_000 + b"\n", "a request is a line of JSON with an action, got b'[["),
            (b"x" * 200_000 + b"\n", "a request is a line of JSON of at most 64 KiB: "),
            (b'{"action": "add"}\n', "KeyError: 'GPU'"),
            (b'{"action": "add"}\n', "ConnectionResetError: another machine"),
        ):
            assert (await asyncio.to_thread(said, line)).startswith(error)


def test_an_engine_that_is_added_in_a_place_that_was_given_up_is_named_and_a_trainer_that_ends_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "engine-0", "serving": None}, {"name": "engine-1", "serving": "engine-1"}]

    def answer(listening: socket.socket) -> None:
        for _ in range(3):
            connection, _ = listening.accept()
            with connection, connection.makefile() as requests:
                if json.loads(requests.readline())["action"] == "add":
                    rows[0]["serving"] = "engine-0"
                connection.sendall(json.dumps({"engines": rows}).encode() + b"\n")
        ending, _ = listening.accept()
        while not ending.recv(1, socket.MSG_PEEK):
            pass
        ending.close()  # what it was sent is unread: the caller's connection is reset

    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{directory}/socket")
        listening.listen()
        place = {"host": socket.gethostname(), "pid": os.getpid(), "socket": f"{directory}/socket"}
        (tmp_path / CONTROL_FILE).write_text(json.dumps(place))
        trainer = threading.Thread(target=answer, args=(listening,))
        trainer.start()
        assert main([str(tmp_path), "add"]) == 0
        assert "engine-0 serves, after" in capsys.readouterr().err
        with pytest.raises(InferenceError, match="ended before it answered"):
            ask(tmp_path, action="list")
        trainer.join()


async def test_only_its_owner_reaches_a_run_and_one_that_is_over_or_killed_is_named(tmp_path: Path) -> None:
    async with running(tmp_path) as run_dir:
        file = run_dir / CONTROL_FILE
        directory = Path(json.loads(file.read_text())["socket"]).parent
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        left = file.read_text()
    assert not file.exists() and not directory.exists()
    with pytest.raises(ConfigError, match="must be the directory of a run that trains now"):
        ask(run_dir, action="list")
    file.write_text(left)
    with pytest.raises(ConfigError, match="the trainer of .*, process .*, does not answer .*: its socket .* cannot be"):
        ask(run_dir, action="list")
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    file.write_text(json.dumps(json.loads(left) | {"pid": ended.pid}))
    with pytest.raises(ConfigError, match="the trainer of .*, process .*, does not answer .*: it was killed"):
        ask(run_dir, action="list")
    file.write_text(json.dumps(json.loads(left) | {"host": "another"}))
    with pytest.raises(ConfigError, match=r"is on another, this is .*: ask there"):
        ask(run_dir, action="list")
    for damaged in ("{}", '{"host":', "[]", left.replace('"pid": ', '"pid": "x", "was": ')):
        file.write_text(damaged)
        with pytest.raises(ConfigError, match=r"is damaged .*: it says where the trainer of .* listens"):
            ask(run_dir, action="list")
    file.write_text(json.dumps(json.loads(left) | {"socket": 7}))
    with pytest.raises(ConfigError, match="does not answer .*: its socket 7 cannot be reached"):
        ask(run_dir, action="list")


def test_a_trainer_that_stands_still_does_not_hold_up_who_lists_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_async.engines.__main__._LIST_TIMEOUT_S", 0.01)
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{directory}/socket")
        silent.listen()
        place = {"host": socket.gethostname(), "pid": 1, "socket": f"{directory}/socket"}
        (tmp_path / CONTROL_FILE).write_text(json.dumps(place))
        with pytest.raises(InferenceError, match="does not answer: it may stand still"):
            ask(tmp_path, action="list")


async def test_a_run_whose_engine_is_no_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))  # a socket's path could not be in it
    async with controlled(tmp_path, None, dict):
        with pytest.raises(InferenceError, match="engine=deterministic is in the trainer's process"):
            await asyncio.to_thread(ask, tmp_path, action="add")
