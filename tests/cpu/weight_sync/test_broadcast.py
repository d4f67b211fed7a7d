"""Broadcasts over modelled engines that die, refuse and stand still, in virtual time: who holds what, and who serves it (contract 5)."""

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.errors import EngineDeadError, NoEngineError, PublishError, WeightsTransferError, WorkerDiedError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledPolicy
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.broadcast import WeightBroadcast
from skyrl_async.weight_sync.publisher import WeightPublisher
from skyrl_async.weights.transfer_group import GroupPlace

TIMEOUT_S = 10.0


class Letters:
    def decode(self, token_ids: list[int], **_: object) -> str:
        return ""


class Group:
    """Of rank 0 and receivers: fails all that are in it when one of them fails, and whoever waits too long."""

    def __init__(self, place: GroupPlace) -> None:
        self.place = place
        self.meeting = asyncio.Barrier(place.num_members)
        self.is_broken = False

    async def together(self) -> None:
        """One bucket. Raises ``RuntimeError``."""
        try:
            async with asyncio.timeout(self.place.timeout_s):
                await self.meeting.wait()
        except (TimeoutError, asyncio.BrokenBarrierError) as error:
            await self.leave()
            raise RuntimeError("Connection closed by peer") from error

    async def leave(self) -> None:
        self.is_broken = True
        await self.meeting.abort()


class Sender(ModelledPolicy):
    """A policy with files that have names, and a rank 0 that sends them in two buckets."""

    def __init__(self) -> None:
        super().__init__(send_seconds=0.5)
        self.groups: list[Group] = []
        self.is_lost = False

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        update = await super().send_weights(version, directory, bucket_bytes)
        path = str(directory / "weights")
        return WeightUpdate(version=update.version, path=path, manifest={}, num_bytes=0)

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        self.is_lost = False
        place = GroupPlace(
            host="",
            port=0,
            name=str(len(self.groups)),
            num_members=1 + num_receivers,
            backend=backend,
            timeout_s=timeout_s,
        )
        self.groups.append(Group(place))
        return place

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        try:
            for _ in range(2):
                if self.is_lost:
                    await self.groups[-1].leave()
                await self.groups[-1].together()
        except RuntimeError as error:
            raise WeightsTransferError(f"{path} did not get through: {error}") from error


class Receiver(ModelledEngine):
    """Does what its plan says at each ``receive_weights``: fine, die or refuse in the middle, or stand still there for ever."""

    def __init__(self, name: str, sender: Sender, *plan: str) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 8, stage_seconds=0.5, load_seconds=1.0)
        self._sender = sender
        self._group: Group
        self.plan = list(plan)
        self.held: set[str] = set()

    @property
    def is_paused(self) -> bool:
        return self._cut_off.reason is None and self._shared.is_paused

    async def connect_transfer(self, init_info: dict[str, Any]) -> None:
        self._cut_off.check()
        self._group = next(group for group in self._sender.groups if group.place.name == init_info["name"])

    async def receive_weights(self, update: WeightUpdate, keep: Collection[str]) -> None:
        self._cut_off.check()
        self.held &= set(keep)
        assert not self._shared.is_paused, "it receives beside generation"
        try:
            await self._group.together()
            await self._act(self.plan.pop(0) if self.plan else "fine")
            await self._group.together()
        except RuntimeError as error:
            raise PublishError(f"{self.name} has not received: {error}") from error
        self.held.add(update.path)

    async def _act(self, event: str) -> None:
        if event == "die":
            self.kill()
            await self._group.leave()
            self._cut_off.check()
        if event == "refuse":
            await self._group.leave()
            raise PublishError(f"{self.name} has no room")
        if event == "freeze":
            await asyncio.get_running_loop().create_future()

    async def load_weights(self, update: WeightUpdate) -> None:
        assert update.path in self.held, "it cannot map the trainer's file"
        await super().load_weights(update)


class Setting:
    def __init__(
        self, *plans: list[str], double_buffer: bool = True, max_retries: int = 0, wait_s: float | None = 0.0
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.policy = Sender()
        self.engines = [Receiver(f"engine-{i}", self.policy, *plan) for i, plan in enumerate(plans)]
        self.client = InferenceEngineClient(self.engines, tokenizer=Letters(), max_model_len=100, engine_wait_s=wait_s)
        self.broadcast = WeightBroadcast(
            policy=self.policy, backend="gloo", must_receive=lambda engine: True, bucket_bytes=1, timeout_s=TIMEOUT_S
        )
        self.publisher = WeightPublisher(
            client=self.client,
            policy=self.policy,
            directory=Path("unused"),
            bucket_bytes=1,
            double_buffer=double_buffer,
            max_retries=max_retries,
            pause_mode=PauseMode.ABORT,
            trace=Trace(None, clock),
            broadcast=self.broadcast,
            clock=clock,
        )

    async def versions(self) -> set[int]:
        return {await engine.version() for engine in self.client.engines}


events = st.lists(st.sampled_from(["fine", "fine", "die", "refuse", "freeze"]), max_size=5)


@given(plans=st.lists(events, min_size=1, max_size=4), double_buffer=st.booleans())
def test_contract_5_whatever_happens_in_broadcasts_all_engines_that_are_left_serve_one_version(
    plans: list[list[str]], double_buffer: bool
) -> None:
    async def main() -> None:
        setting = Setting(*([] for _ in plans), double_buffer=double_buffer)
        await setting.publisher.publish(0)
        for engine, plan in zip(setting.engines, plans, strict=True):
            engine.plan = plan
        served = 0
        for version in range(1, 12):
            try:
                await setting.publisher.publish(version)
                served = version
            except PublishError:
                assert len(setting.client.engines) > 0
            except NoEngineError:
                assert all(engine._cut_off.reason for engine in setting.engines)
                return
            assert await setting.versions() == {served}
            assert not any(engine.is_paused for engine in setting.engines)
            assert all(len(engine.held) <= 1 + double_buffer for engine in setting.client.engines)
        assert served == 11, "plans are over by then"
        assert {engine._cut_off.reason for engine in setting.client.engines} == {None}

    run_in_virtual_time(main())


def test_a_group_lasts_as_long_as_its_members() -> None:
    async def main() -> None:
        setting = Setting([], [])
        for version in range(3):
            await setting.publisher.publish(version)
        assert [group.place.num_members for group in setting.policy.groups] == [3]
        joining = Receiver("engine-9", setting.policy)
        await setting.client.add_engine(joining)
        assert await setting.versions() == {2}
        assert [group.place.num_members for group in setting.policy.groups] == [3, 2]
        await setting.publisher.publish(3)
        removed = await setting.client.remove_engine("engine-0")
        await removed.close()
        await setting.publisher.publish(4)
        await setting.publisher.publish(5)
        assert [group.place.num_members for group in setting.policy.groups] == [3, 2, 4, 3]
        assert await setting.versions() == {5}

    run_in_virtual_time(main())


def test_an_engine_that_gets_the_name_of_one_that_left_is_sent_what_that_had() -> None:
    async def main() -> None:
        setting = Setting([], [])
        await setting.publisher.publish(0)
        removed = await setting.client.remove_engine("engine-1")
        await removed.close()
        await setting.client.add_engine(Receiver("engine-1", setting.policy))
        assert await setting.versions() == {0}
        await setting.publisher.publish(1)
        assert await setting.versions() == {1}

    run_in_virtual_time(main())


def test_an_engine_that_dies_in_a_broadcast_is_left_out_and_the_others_get_the_version_at_once() -> None:
    async def main() -> None:
        setting = Setting(["fine", "die"], [], [])
        await setting.publisher.publish(0)
        began = asyncio.get_running_loop().time()
        await setting.publisher.publish(1)
        assert asyncio.get_running_loop().time() - began < TIMEOUT_S
        assert setting.client.engines == tuple(setting.engines[1:])
        assert await setting.versions() == {1}

    run_in_virtual_time(main())


def test_an_engine_that_hangs_is_closed_after_the_timeout() -> None:
    async def main() -> None:
        setting = Setting(["fine", "freeze"], [])
        await setting.publisher.publish(0)
        await setting.publisher.publish(1)
        assert setting.engines[0]._cut_off.reason and setting.client.engines == (setting.engines[1],)
        assert await setting.versions() == {1}

    run_in_virtual_time(main())


@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_broadcast_that_breaks_off_without_a_death_is_a_failed_publish_that_may_be_tried_again(
    max_retries: int,
) -> None:
    async def main() -> None:
        setting = Setting(["fine", "refuse", "refuse"], [], max_retries=max_retries)
        await setting.publisher.publish(0)
        with (
            contextlib.nullcontext()
            if max_retries
            else pytest.raises(PublishError, match="version 1 did not get to every")
        ):
            await setting.publisher.publish(1)
        assert await setting.versions() == {max_retries}
        await setting.publisher.publish(2)
        assert await setting.versions() == {2}

    run_in_virtual_time(main())


def test_a_broken_older_group_fails_no_publish() -> None:
    """Such as a rank 0 that was replaced since: the same file is sent in a group formed anew."""

    async def main() -> None:
        setting = Setting([], [])
        await setting.publisher.publish(0)
        setting.policy.is_lost = True
        await setting.publisher.publish(1)
        assert len(setting.policy.groups) == 2 and await setting.versions() == {1}

    run_in_virtual_time(main())


def test_policy_workers_that_are_gone_for_good_end_a_broadcast_with_their_error() -> None:
    async def main() -> None:
        setting = Setting([])

        async def given_up(path: Path, bucket_bytes: int) -> None:
            raise WorkerDiedError("restarts are used up")

        setting.policy.broadcast_weights = given_up  # type: ignore[method-assign]
        with pytest.raises(WorkerDiedError, match="restarts are used up"):
            await setting.publisher.publish(0)

    run_in_virtual_time(main())


def test_engines_that_can_map_the_file_are_not_sent_it() -> None:
    async def main() -> None:
        setting = Setting([], [])
        broadcast = WeightBroadcast(
            policy=setting.policy,
            backend="gloo",
            must_receive=lambda engine: engine.name == "engine-1",
            bucket_bytes=1,
            timeout_s=TIMEOUT_S,
        )
        update = await setting.policy.send_weights(7, Path("there"), 1)
        plain = ModelledEngine("plain", num_tokens_of=lambda prompt, seed: 8)

        async def lose(engine: object, death: EngineDeadError) -> None:
            raise death

        await broadcast.deliver([*setting.engines, plain], update, lose)
        assert [engine.held for engine in setting.engines] == [set(), {"there/weights"}]

    run_in_virtual_time(main())


def test_an_engine_that_dies_while_it_comes_up_does_not_join() -> None:
    async def main() -> None:
        setting = Setting([])
        await setting.publisher.publish(0)
        with pytest.raises(EngineDeadError):
            await setting.client.add_engine(Receiver("engine-9", setting.policy, "die"))
        assert setting.client.engines == tuple(setting.engines)
        await setting.publisher.publish(1)
        assert await setting.versions() == {1}

    run_in_virtual_time(main())
