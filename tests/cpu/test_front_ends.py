"""Front ends that never come up. Those that serve, die and are replaced are in test_server_process.py, on a real Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.errors import DeadlineError
from skyrl_async.inference.server import front_ends
from skyrl_async.simulator.clock import run_in_virtual_time
from tests.cpu.test_server_process import settings


class SilentRay:
    """Stands in for Ray, in virtual time: its actors answer the calls named, and no other."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.num_actors = 0
        self.killed: list[Any] = []

    def remote(self, actor_class: type) -> "SilentRay":
        return self

    def options(self, **options: Any) -> Any:
        return SilentClass(self)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class SilentClass:
    def __init__(self, ray: SilentRay) -> None:
        self.ray = ray

    def remote(self, *arguments: Any) -> "SilentActor":
        self.ray.num_actors += 1
        return SilentActor(self.ray.answers)


class SilentActor:
    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> "SilentCall":
        return SilentCall(self.answers.get(name))


class SilentCall:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def remote(self, *arguments: Any) -> Any:
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
        async with asyncio.timeout(1e6), front_ends.endpoint_processes(settings(tmp_path), [], num_front_ends=2):
            raise AssertionError

    with pytest.raises(DeadlineError, match=complaint):
        run_in_virtual_time(serve())
    assert len(ray.killed) == ray.num_actors == 2
