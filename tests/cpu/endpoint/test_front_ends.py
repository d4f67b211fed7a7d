"""Front ends that never come up, or die on the way. Those that serve, die and are replaced are in test_server_process.py, on a real Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from skyrl_async.endpoint.server import front_ends
from skyrl_async.errors import DeadlineError, InferenceError, SkyRLAsyncError
from skyrl_async.runtime.outages import Outages
from skyrl_async.simulator.clock import run_in_virtual_time
from tests.cpu.endpoint.test_server_process import settings


class SilentRay:
    """Stands in for Ray, in virtual time: its actors answer the calls named, and no other. Those after the last one are like it."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = answers
        self.num_actors = 0
        self.killed: list[Any] = []

    def remote(self, actor_class: type) -> "SilentRay":
        return self

    def options(self, **options: Any) -> Any:
        return SilentClass(self)

    def get_runtime_context(self) -> "SilentRay":
        return self

    def get_node_id(self) -> str:
        return "ab" * 28

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class SilentClass:
    def __init__(self, ray: SilentRay) -> None:
        self.ray = ray

    def remote(self, *arguments: Any) -> "SilentActor":
        self.ray.num_actors += 1
        return SilentActor(self.ray.answers[: self.ray.num_actors][-1])


class SilentActor:
    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> "SilentCall":
        return SilentCall(self.answers.get(name))


class SilentCall:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def remote(self, *arguments: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ({}, "front end 0 of the endpoint did not start within 180 s"),
        ({"start": ("127.0.0.1", 8000)}, "front end 0 of the endpoint did not answer within 180 s"),
    ],
)
def test_a_front_end_that_never_comes_up_ends_the_start_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], complaint: str
) -> None:
    ray = SilentRay(answers)
    monkeypatch.setattr(front_ends, "ray", ray)

    async def serve() -> None:
        async with asyncio.timeout(1e6), front_ends.endpoint_processes(settings(tmp_path, num_front_ends=2), []):
            raise AssertionError

    with pytest.raises(DeadlineError, match=complaint):
        run_in_virtual_time(serve())
    assert len(ray.killed) == ray.num_actors == 2


DIES_STARTING = {"start": ActorDiedError()}
DIES_STARTED = {"start": ("127.0.0.1", 8000), "connect": ActorDiedError(), "wait": ActorDiedError()}
SERVES = {"start": ("127.0.0.1", 8000), "connect": True, "ping": True, "follow": True, "stop": True}


@pytest.mark.parametrize(
    "deaths", [[DIES_STARTING], [DIES_STARTED], [DIES_STARTING, DIES_STARTED], [DIES_STARTED, DIES_STARTING]]
)
def test_a_front_end_that_dies_while_it_comes_up_is_replaced_and_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[dict[str, Any]]
) -> None:
    async def serve(max_restarts: int) -> int:
        ray = SilentRay(*deaths, SERVES)
        monkeypatch.setattr(front_ends, "ray", ray)
        async with front_ends.endpoint_processes(settings(tmp_path, max_restarts=max_restarts), []) as (front_end,):
            await asyncio.sleep(60.0)
            await front_end.follow([])
        return ray.num_actors

    assert run_in_virtual_time(serve(len(deaths))) == len(deaths) + 1
    with pytest.raises(InferenceError, match=rf"ActorDiedError.*server.max_restarts={len(deaths) - 1} are used up"):
        run_in_virtual_time(serve(len(deaths) - 1))


def test_whoever_is_told_that_a_front_end_stays_gone_can_go_on_while_the_outage_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_ends, "ray", SilentRay(SERVES | {"wait": ActorDiedError()}))

    async def serve() -> SkyRLAsyncError:
        outages, told = Outages(), asyncio.Queue[SkyRLAsyncError]()
        only_one = settings(tmp_path, max_restarts=0)
        async with front_ends.endpoint_processes(only_one, [], outages=outages, on_failure=told.put_nowait):
            error = await told.get()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1e6):
                    await outages.wait_until_over()
        return error

    error = run_in_virtual_time(serve())
    assert isinstance(error, InferenceError)
    assert "raise server.max_restarts, and continue with trainer.resume_mode=latest" in str(error)
