"""Weight publishes over modelled engines that refuse, die and are slow, in virtual time (contracts 5 and 6)."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.errors import (
    ConfigError,
    EngineDeadError,
    NoEngineError,
    PublishError,
    TrainingError,
    WeightsLostError,
    WeightsWriteError,
)
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.shutdown import GRACE_S
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledPolicy
from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.publisher import PublishTimes, WeightPublisher
from tests.patience import PATIENCE_S


class Letters:
    def decode(self, token_ids: list[int], **_: object) -> str:
        return ""


class Troubled(ModelledEngine):
    """Does what its plan says at each call of ``stage_weights``, ``pause``, ``load_weights`` and ``resume``: fine, refuse, die or
    break."""

    def __init__(self, name: str) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 8, stage_seconds=0.5, load_seconds=1.0)
        self.plan: dict[str, list[str]] = {}

    @property
    def is_paused(self) -> bool:
        return self._cut_off.reason is None and self._shared.is_paused

    async def pause(self, mode: PauseMode) -> None:
        await self._follow("pause")
        await super().pause(mode)

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self._follow("stage")
        await super().stage_weights(update)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._follow("load")
        await super().load_weights(update)

    async def resume(self) -> None:
        await self._follow("resume")
        await super().resume()

    async def _follow(self, call: str) -> None:
        await asyncio.sleep(0.25)
        event = self.plan[call].pop(0) if self.plan.get(call) else "fine"
        if event == "refuse":
            raise PublishError(f"{self.name} refuses")
        if event == "die":
            self.kill()
        if event == "break":
            raise RuntimeError(f"{self.name} breaks")


class Remote(Troubled):
    """As in a process of its own: a call goes on when its caller is cancelled, and the next one comes after it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._latest: asyncio.Future[None] | None = None

    async def pause(self, mode: PauseMode) -> None:
        await self._in_turn(super().pause, mode)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._in_turn(super().load_weights, update)

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        asked = asyncio.get_running_loop().time()
        paused = asked

        async def switch() -> None:
            nonlocal paused
            await Troubled.pause(self, mode)
            paused = asyncio.get_running_loop().time()
            await Troubled.load_weights(self, update)

        await self._in_turn(switch)
        return paused - asked

    async def resume(self) -> None:
        await self._in_turn(super().resume)

    async def _in_turn(self, call: Callable[..., Awaitable[None]], *arguments: object) -> None:
        before = self._latest

        async def go_on() -> None:
            if before is not None:
                await asyncio.wait([before])
            await call(*arguments)

        self._latest = asyncio.ensure_future(go_on())
        await asyncio.shield(self._latest)


class Setting:
    def __init__(
        self,
        num_engines: int,
        policy: ModelledPolicy | None = None,
        *,
        make: Callable[[str], Troubled] = Troubled,
        max_retries: int = 0,
        double_buffer: bool = True,
        wait_s: float | None = 0.0,
        verify_checksums: bool | None = False,
        directory: Path = Path("unused"),
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.engines = [make(f"engine-{i}") for i in range(num_engines)]
        self.client = InferenceEngineClient(self.engines, tokenizer=Letters(), max_model_len=100, engine_wait_s=wait_s)
        self.policy = policy or ModelledPolicy(send_seconds=0.5)
        self.publisher = WeightPublisher(
            client=self.client,
            policy=self.policy,
            directory=directory,
            max_retries=max_retries,
            double_buffer=double_buffer,
            verifies_checksums=verify_checksums,
            bucket_bytes=1,
            pause_mode=PauseMode.ABORT,
            trace=Trace(None, clock),
            probe_prompt_token_ids=(1, 2, 3),
            max_logprob_gap=0.1,
            clock=clock,
        )

    async def versions_served(self) -> set[int]:
        """What the engines that the client knows stamp on tokens; each must answer."""
        request = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=4))
        return {v for engine in self.client.engines for v in (await engine.generate(request)).versions}


async def failure_of(publishing: Coroutine[Any, Any, PublishTimes]) -> Exception | None:
    try:
        await publishing
    except (PublishError, NoEngineError) as error:
        return error
    return None


events = st.sampled_from(["fine", "fine", "refuse", "die"])
plans = st.fixed_dictionaries(
    {
        "pause": st.lists(st.sampled_from(["fine", "fine", "die"]), max_size=4),
        "stage": st.lists(events, max_size=4),
        "load": st.lists(events, max_size=6),
        "resume": st.lists(st.sampled_from(["fine", "fine", "die"]), max_size=4),
    }
)


@given(plan=st.lists(plans, min_size=1, max_size=3))
def test_contract_5_whatever_engines_do_all_that_are_left_serve_one_version_and_none_is_paused(
    plan: list[dict[str, list[str]]],
) -> None:
    async def main() -> None:
        setting = Setting(len(plan))
        await setting.publisher.publish(0)
        for engine, own in zip(setting.engines, plan, strict=True):
            engine.plan = own
        served = 0
        for version in range(1, 4):
            failure = await failure_of(setting.publisher.publish(version))
            served = version if failure is None else served
            assert not any(engine.is_paused for engine in setting.engines)
            assert setting.client.engines == tuple(
                engine for engine in setting.engines if engine._cut_off.reason is None
            )
            if not setting.client.engines:
                assert failure is not None
                return
            assert isinstance(failure, PublishError | None)
            assert failure is None or f"still serves version {served}" in str(failure)
            assert setting.client.policy_version == served
            assert await setting.versions_served() == {served}

    run_in_virtual_time(main())


@given(at=st.floats(0.0, 2.6), call=st.sampled_from(["pause", "load", "resume"]))
def test_contract_5_a_publish_cancelled_at_any_moment_leaves_no_engine_paused(at: float, call: str) -> None:
    async def main() -> None:
        setting = Setting(2)
        setting.engines[0].plan = {call: ["fine", "die"]}
        await setting.publisher.publish(0)
        publishing = asyncio.ensure_future(setting.publisher.publish(1))
        await asyncio.sleep(at)
        publishing.cancel()
        await asyncio.wait([publishing])
        assert not any(engine.is_paused for engine in setting.engines)

    run_in_virtual_time(main())


@pytest.mark.parametrize("call", ["pause", "load"])
def test_contract_5_an_unforeseen_failure_leaves_no_engine_paused(call: str) -> None:
    async def main() -> None:
        setting = Setting(2)
        await setting.publisher.publish(0)
        setting.engines[0].plan = {call: ["break"]}
        with pytest.raises(RuntimeError, match="engine-0 breaks"):
            await setting.publisher.publish(1)
        assert not any(engine.is_paused for engine in setting.engines)

    run_in_virtual_time(main())


class LongSteps(ModelledEngine):
    """One that ends the step it is in for some seconds before it has paused."""

    def __init__(self, name: str, *, step_seconds: float, load_seconds: float) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 8, stage_seconds=0.5, load_seconds=load_seconds)
        self._step_seconds = step_seconds

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.sleep(self._step_seconds)
        await super().pause(mode)


def test_an_engine_that_has_paused_loads_while_another_one_ends_its_step() -> None:
    async def main() -> None:
        setting = Setting(0)
        quick = LongSteps("quick", step_seconds=1.0, load_seconds=6.0)
        slow = LongSteps("slow", step_seconds=4.0, load_seconds=2.0)
        for engine in (quick, slow):
            await setting.client.add_engine(engine)
        times = await setting.publisher.publish(0)
        assert (times.acknowledge, times.load, times.pause) == (1.0, 6.0, 6.0)
        publishing = asyncio.ensure_future(setting.publisher.publish(1))
        await asyncio.sleep(
            0.5 + 0.5 + 6.5
        )  # sent and staged; at 6 the slow one has loaded, at 7 the quick one will have
        assert (await slow.version(), await quick.version(), setting.client.policy_version) == (1, 0, 0)
        assert slow._shared.is_paused, "it samples nothing before all have loaded"
        await publishing
        assert await setting.versions_served() == {1}

    run_in_virtual_time(main())


def test_contract_5_an_engine_that_cannot_go_back_is_closed_rather_than_serving_another_version() -> None:
    async def main() -> None:
        setting = Setting(3)
        await setting.publisher.publish(0)
        setting.engines[0].plan = {"load": ["refuse"]}
        setting.engines[1].plan = {"load": ["fine", "refuse"]}
        with pytest.raises(PublishError, match="engine-0 refused version 1 .* still serves version 0"):
            await setting.publisher.publish(1)
        assert [engine.name for engine in setting.client.engines] == ["engine-0", "engine-2"]
        assert setting.engines[1]._cut_off.reason
        assert await setting.versions_served() == {0}

    run_in_virtual_time(main())


def test_the_death_of_the_last_engine_is_named_by_the_phase_it_happened_in() -> None:
    async def main() -> None:
        setting = Setting(1)
        await setting.publisher.publish(0)
        setting.engines[0].plan = {"load": ["die"]}
        await setting.publisher.publish(1)

    with pytest.raises(NoEngineError, match="no inference engine survived 'load'"):
        run_in_virtual_time(main())


def test_an_export_that_fails_pauses_no_engine_and_the_old_version_is_served() -> None:
    class Broken(ModelledPolicy):
        async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
            if version:
                raise TrainingError("the disk is full")
            return await super().send_weights(version, directory, bucket_bytes)

    async def main() -> None:
        setting = Setting(2, Broken())
        await setting.publisher.publish(0)
        with pytest.raises(TrainingError, match="disk is full"):
            await setting.publisher.publish(1)
        assert await setting.versions_served() == {0}

    run_in_virtual_time(main())


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    return path


def files(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


class Full(ModelledPolicy):
    """Finds no room for its weights, so many times; leaves what it had written."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(send_seconds=0.5)
        self.failures = list(failures)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        await super().send_weights(version, directory, bucket_bytes)
        path = written(directory / "v.safetensors")
        if version and self.failures:
            raise self.failures.pop(0)
        return WeightUpdate(version=version, path=str(path), manifest={}, num_bytes=7)


FULL = WeightsWriteError("cannot write: no space left on device")


@pytest.mark.parametrize("failure", [FULL, OSError(28, "no space left on device")])
def test_shared_memory_that_is_full_fails_a_publish_before_any_pause_and_what_was_written_is_gone(
    failure: Exception, tmp_path: Path
) -> None:
    async def main() -> None:
        setting = Setting(2, Full(failure), directory=tmp_path)
        await setting.publisher.publish(0)
        before = files(tmp_path)
        with pytest.raises(PublishError, match="version 1 cannot be sent .*no space left.*still serves version 0"):
            await setting.publisher.publish(1)
        assert await setting.versions_served() == {0}
        assert files(tmp_path) == before
        await setting.publisher.publish(1)
        assert len(files(tmp_path)) == 2, "a directory and its file: those of the version before are gone"
        setting.publisher.close()
        assert files(tmp_path) == set()

    run_in_virtual_time(main())


def test_the_files_of_the_version_before_are_deleted_after_the_pause(tmp_path: Path) -> None:
    class Seeing(Troubled):
        seen: frozenset[Path] = frozenset()

        async def resume(self) -> None:
            await super().resume()
            self.seen = frozenset(files(tmp_path))

    async def main() -> None:
        setting = Setting(1, Full(), make=Seeing, directory=tmp_path)
        await setting.publisher.publish(0)
        before = files(tmp_path)
        await setting.publisher.publish(1)
        (engine,) = setting.engines
        assert isinstance(engine, Seeing)
        assert before <= engine.seen and not before & files(tmp_path)

    run_in_virtual_time(main())


class Instant(Troubled):
    """Loads and pauses in no time, for a real loop."""

    def __init__(self, name: str) -> None:
        ModelledEngine.__init__(self, name, num_tokens_of=lambda prompt, seed: 8)
        self.plan = {}

    async def _follow(self, call: str) -> None:
        pass


class InstantlyWritten(Full):
    def __init__(self) -> None:
        ModelledPolicy.__init__(self)
        self.failures = []


@pytest.fixture
def freeing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[threading.Thread]]]:
    """Until the event is set, no thread but the main one gets to the end of a deletion; and who has begun one."""
    ended, threads, delete = threading.Event(), list[threading.Thread](), shutil.rmtree

    def slow(path: Path, ignore_errors: bool) -> None:
        threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            ended.wait(timeout=PATIENCE_S)
        delete(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slow)
    yield ended, threads
    ended.set()


@pytest.mark.parametrize("double_buffer", [True, False])
async def test_the_loop_runs_while_files_are_deleted_and_the_next_version_waits_for_their_room(
    tmp_path: Path, freeing: tuple[threading.Event, list[threading.Thread]], double_buffer: bool
) -> None:
    ended, threads = freeing
    setting = Setting(1, InstantlyWritten(), make=Instant, double_buffer=double_buffer, directory=tmp_path)
    publisher = setting.publisher
    await publisher.publish(0)
    before = files(tmp_path)
    if double_buffer:
        await publisher.publish(1)
        assert await setting.versions_served() == {1} and before < files(tmp_path)
    there = files(tmp_path)
    await publisher.gather(2)
    sending = asyncio.ensure_future(publisher.send(2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sending.done() and files(tmp_path) == there
    ended.set()
    assert await sending
    assert not before & files(tmp_path) and threading.main_thread() not in threads
    await publisher.load()
    publisher.close()
    assert files(tmp_path) == set()


async def test_a_run_that_ends_while_files_are_deleted_waits_for_no_deletion_and_leaves_none_of_them(
    tmp_path: Path, freeing: tuple[threading.Event, list[threading.Thread]]
) -> None:
    setting = Setting(1, InstantlyWritten(), make=Instant, directory=tmp_path)
    for version in range(2):
        await setting.publisher.publish(version)
    publishing = asyncio.ensure_future(setting.publisher.publish(2))
    for _ in range(20):
        await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.wait([publishing], timeout=PATIENCE_S)
    assert publishing.cancelled() and len(files(tmp_path)) == 4, "two versions, each in its directory"
    setting.publisher.close()
    assert files(tmp_path) == set()


def test_a_publish_that_fails_is_tried_again_as_often_as_was_said() -> None:
    async def main() -> None:
        setting = Setting(2, max_retries=2)
        await setting.publisher.publish(0)
        setting.engines[0].plan = {"load": ["refuse", "refuse"]}
        await setting.publisher.publish(1)
        assert await setting.versions_served() == {1}
        setting.engines[0].plan = {"load": ["refuse", "refuse", "refuse"]}
        with pytest.raises(PublishError, match="engine-0 refused version 2 .*still serves version 1"):
            await setting.publisher.publish(2)
        assert await setting.versions_served() == {1}

    run_in_virtual_time(main())


def test_a_failure_of_the_policy_is_no_failed_publish_and_is_not_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Full(TrainingError("a worker died"), TrainingError("not reached"))
        setting = Setting(2, policy, max_retries=2, directory=tmp_path)
        with pytest.raises(TrainingError, match="a worker died"):
            await setting.publisher.publish(1)

    run_in_virtual_time(main())


@given(at=st.floats(0.0, 3.0), has_publish=st.booleans())
def test_contract_6_an_engine_that_joins_beside_a_publish_serves_what_the_others_serve(
    at: float, has_publish: bool
) -> None:
    async def main() -> None:
        setting = Setting(1)
        await setting.publisher.publish(0)
        joining = Troubled("engine-9")

        async def join() -> None:
            await asyncio.sleep(at)
            await setting.client.add_engine(joining)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(join())
            if has_publish:
                tasks.create_task(setting.publisher.publish(1))
        assert setting.client.engines == (setting.engines[0], joining)
        assert await setting.versions_served() == {int(has_publish)}
        assert not any(engine.is_paused for engine in (*setting.engines, joining))

    run_in_virtual_time(main())


def test_contract_6_an_engine_that_does_not_prove_its_weights_does_not_join() -> None:
    async def main() -> None:
        setting = Setting(1)
        await setting.publisher.publish(3)

        class Forgetful(Troubled):
            async def version(self) -> int:
                return 2

        with pytest.raises(PublishError, match="engine-9 came up with version 2 .*expected version 3 and version-3"):
            await setting.client.add_engine(Forgetful("engine-9"))
        assert setting.client.engines == tuple(setting.engines)

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("verify_checksums", "num_bytes", "is_proven"),
    [(None, 1 << 20, True), (None, 1 << 30, False), (True, 1 << 30, True), (False, 1 << 20, False)],
)
def test_contract_6_an_engine_in_the_place_of_the_only_one_is_held_against_its_checksum(
    verify_checksums: bool | None, num_bytes: int, is_proven: bool
) -> None:
    """Of the version that it loads, which nobody serves any more."""

    class Weights(ModelledPolicy):
        async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
            return WeightUpdate(version=version, path="", manifest={}, num_bytes=num_bytes)

    class Garbled(Troubled):
        async def checksum(self) -> str:
            return "garbled"

    async def main() -> None:
        setting = Setting(1, Weights(), wait_s=None, verify_checksums=verify_checksums)
        for version in range(3):
            await setting.publisher.publish(version)
        setting.engines[0].kill()
        setting.client.drop_engine(setting.engines[0], EngineDeadError("killed"))
        if not is_proven:
            await setting.client.add_engine(Garbled("engine-0.1"))
            return
        with pytest.raises(PublishError, match="engine-0.1 came up with version 2 and checksum garbled, .*version-2"):
            await setting.client.add_engine(Garbled("engine-0.1"))
        await setting.client.add_engine(Troubled("engine-0.2"))
        assert await setting.versions_served() == {2}

    run_in_virtual_time(main())


def test_a_publish_without_engines_waits_for_one_which_then_serves_it() -> None:
    async def main() -> None:
        setting = Setting(1, wait_s=None)
        await setting.publisher.publish(0)
        setting.engines[0].plan = {"load": ["die"]}
        late = Troubled("engine-9")

        async def join() -> None:
            await asyncio.sleep(100.0)
            await setting.client.add_engine(late)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(join())
            times = await setting.publisher.publish(1)
        assert setting.client.engines == (late,) and await setting.versions_served() == {1}
        assert times.pause < 5.0
        assert await setting.publisher.verifier.check(1, is_first=True) == {"async/engine_logprob_gap": 0.0}

    run_in_virtual_time(main())


def test_an_engine_that_a_publish_gives_up_serves_nobody_else_either() -> None:
    async def main() -> None:
        setting = Setting(2)
        await setting.publisher.publish(0)

        async def too_late(update: WeightUpdate) -> None:
            raise EngineDeadError("no answer to load_weights within 65 s")

        setting.engines[0].load_weights = too_late  # type: ignore[method-assign]
        await setting.publisher.publish(1)
        assert setting.engines[0]._cut_off.reason
        assert setting.client.engines == (setting.engines[1],)

    run_in_virtual_time(main())


def test_engines_that_disagree_are_found_by_attestation() -> None:
    async def main() -> None:
        setting = Setting(2)
        await setting.publisher.publish(0)
        setting.engines[1]._version = 7
        await setting.publisher.verifier.verify_checksums(0)

    with pytest.raises(PublishError, match="expected version 0 and equal weights in every engine"):
        run_in_virtual_time(main())


class Claiming(ModelledPolicy):
    """Says one log-prob of every token."""

    def __init__(self, logprob: float) -> None:
        super().__init__()
        self.logprob = logprob

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 2) + [self.logprob]


@pytest.mark.parametrize(("logprob", "gap"), [(-1.5, "0.5"), (float("nan"), "nan"), (float("-inf"), "inf")])
def test_contract_6_the_probe_fails_by_the_largest_gap_and_by_numbers_that_are_none(logprob: float, gap: str) -> None:
    async def main() -> None:
        setting = Setting(2, Claiming(logprob))
        await setting.publisher.publish(0)
        await setting.publisher.verifier.check(0, is_first=True)

    with pytest.raises(PublishError, match=f"differ from the trainer's by up to {gap} nats at version 0"):
        run_in_virtual_time(main())


def test_contract_6_a_probe_that_no_engine_answers_proves_nothing() -> None:
    class Mute(Troubled):
        async def generate(self, request: EngineRequest) -> EngineOutput:
            raise EngineDeadError("gone")

    async def main() -> None:
        setting = Setting(0)
        setting.client = InferenceEngineClient([Mute("mute")], tokenizer=Letters(), max_model_len=100)
        setting.publisher.verifier.client = setting.client
        await setting.publisher.verifier.check(0, is_first=False)

    with pytest.raises(NoEngineError, match="no inference engine survived the probe"):
        run_in_virtual_time(main())


def test_contract_6_a_prompt_that_fills_the_context_is_probed_at_its_end() -> None:
    async def main() -> dict[str, float]:
        setting = Setting(1)
        setting.publisher.verifier.probe_prompt_token_ids = tuple(range(100))
        await setting.publisher.publish(0)
        return await setting.publisher.verifier.check(0, is_first=True)

    assert run_in_virtual_time(main()) == {"async/engine_logprob_gap": 0.0}


class Buckets(ModelledPolicy):
    """Its versions are files; remembers what was gathered when, and fails as it is told."""

    def __init__(self) -> None:
        super().__init__(gather_seconds=1.0, send_seconds=4.0)
        self.failures: dict[tuple[str, int], Exception] = {}

    async def gather_weights(self, version: int) -> int:
        await super().gather_weights(version)
        if failure := self.failures.pop(("gather", version), None):
            raise failure
        return 7

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        path = written(directory / f"v{version}.safetensors")
        await super().send_weights(version, directory, bucket_bytes)
        if failure := self.failures.pop(("send", version), None):
            raise failure
        return WeightUpdate(version=version, path=str(path), manifest={}, num_bytes=7)


def versions_in(directory: Path) -> set[str]:
    return {path.stem for path in directory.rglob("*.safetensors")}


@pytest.mark.parametrize("double_buffer", [True, False])
@pytest.mark.parametrize("phase", ["gather", "send", "stage", "pause", "load"])
def test_a_publish_killed_in_any_phase_leaves_every_engine_on_the_old_version_and_nothing_of_the_new_one(
    phase: str, double_buffer: bool, tmp_path: Path
) -> None:
    """Killed by an error that nobody foresaw, and by a cancellation."""

    async def main(is_cancelled: bool) -> None:
        policy = Buckets()
        setting = Setting(2, policy, directory=tmp_path, double_buffer=double_buffer)
        await setting.publisher.publish(1)
        policy.failures[phase, 2] = RuntimeError("killed")
        setting.engines[0].plan = {} if is_cancelled else {phase: ["break"]}
        publishing = asyncio.ensure_future(setting.publisher.publish(2))
        stage_seconds = 0.75 if double_buffer else 0.0
        until = {"gather": 0.5, "send": 3.0, "stage": 5.3, "pause": 5.1 + stage_seconds, "load": 6.3}[phase]
        if is_cancelled:
            await asyncio.sleep(until)
            assert not publishing.done()
            publishing.cancel()
        await asyncio.wait([publishing])
        assert publishing.cancelled() or isinstance(publishing.exception(), RuntimeError)
        assert not any(engine.is_paused for engine in setting.engines)
        assert await setting.versions_served() == {1} and setting.client.policy_version == 1
        assert versions_in(tmp_path) <= {"v1"}
        policy.failures.clear()
        await setting.publisher.publish(3)
        assert await setting.versions_served() == {3}
        setting.publisher.close()
        assert files(tmp_path) == set()

    if not (phase == "stage" and not double_buffer):
        run_in_virtual_time(main(is_cancelled=False))
    run_in_virtual_time(main(is_cancelled=True))


@pytest.mark.slow
@pytest.mark.parametrize("double_buffer", [True, False])
@given(at=st.floats(5.0, 9.0))
def test_a_publish_cancelled_while_engines_load_elsewhere_leaves_all_of_them_on_one_version(
    double_buffer: bool, at: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The load goes on in their processes. What they serve is what the publisher says, and what an engine that comes up loads."""
    directory = tmp_path_factory.mktemp("buckets")

    async def main() -> None:
        setting = Setting(2, Buckets(), make=Remote, directory=directory, double_buffer=double_buffer, wait_s=None)
        publisher = setting.publisher
        await publisher.publish(1)
        setting.engines[0].load_seconds = 0.1
        publishing = asyncio.ensure_future(publisher.publish(2))
        await asyncio.sleep(at)
        publishing.cancel()
        await asyncio.wait([publishing])
        version = publisher._served_version
        assert not any(engine.is_paused for engine in setting.engines)
        assert setting.client.policy_version == version in (1, 2)
        assert await setting.versions_served() <= {version}
        has_loaded = at >= 5.25  # when both have paused; without a double buffer there is nothing to go back to
        assert len(setting.client.engines) == 2 or (has_loaded and not double_buffer)
        assert versions_in(directory) <= {f"v{version}"}
        if double_buffer:
            await setting.client.add_engine(Troubled("engine-9"))
            assert await setting.versions_served() == {version}
        await asyncio.sleep(100.0)
        assert await setting.versions_served() <= {version}, "nothing goes on behind the publisher's back"
        publisher.close()

    run_in_virtual_time(main())


def test_an_engine_that_keeps_a_cancellation_waiting_is_closed() -> None:
    async def main() -> None:
        setting = Setting(2, make=Remote)
        await setting.publisher.publish(0)
        setting.engines[0].load_seconds = 1000.0
        publishing = asyncio.ensure_future(setting.publisher.publish(1))
        await asyncio.sleep(10.0)
        publishing.cancel()
        await asyncio.wait([publishing])
        assert asyncio.get_running_loop().time() < 10.0 + 2 * GRACE_S + 5.0
        assert setting.engines[0]._cut_off.reason and setting.client.engines == (setting.engines[1],)
        assert await setting.versions_served() == {0} and not setting.engines[1].is_paused

    run_in_virtual_time(main())


@pytest.mark.parametrize("double_buffer", [True, False])
def test_an_engine_that_breaks_when_the_others_have_loaded_makes_these_go_back(
    double_buffer: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        setting = Setting(3, Buckets(), directory=tmp_path, double_buffer=double_buffer)
        await setting.publisher.publish(1)
        first = setting.engines[0]

        async def break_late(update: WeightUpdate) -> None:
            first.load_weights = load  # type: ignore[method-assign]
            await asyncio.sleep(10.0)
            assert setting.engines[1]._version == setting.engines[2]._version == 2
            raise RuntimeError("engine-0 breaks")

        load, first.load_weights = first.load_weights, break_late  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="engine-0 breaks"):
            await setting.publisher.publish(2)
        assert await setting.versions_served() == ({1} if double_buffer else set())
        assert setting.client.engines == (tuple(setting.engines) if double_buffer else ())
        assert not any(engine.is_paused for engine in setting.engines)

    run_in_virtual_time(main())


def test_with_a_double_buffer_the_next_version_is_gathered_while_the_one_before_is_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        setting = Setting(1, Buckets(), directory=tmp_path)
        publisher = setting.publisher
        await publisher.publish(1)
        await publisher.gather(2)
        await publisher.send(2)
        assert versions_in(tmp_path) == {"v1", "v2"}
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(publisher.load())
            await publisher.gather(3)
            assert not loading.done()
        times = loading.result()
        assert times is not None and times.version == 2 and (times.gather, times.send) == (1.0, 4.0)
        assert versions_in(tmp_path) == {"v2"}
        assert publisher.lags()["engine-0"].steps == 1
        assert await publisher.load() is None, "there is nothing newer"
        assert await publisher.send(3) and (await publisher.load()) is not None
        assert versions_in(tmp_path) == {"v3"} and await setting.versions_served() == {3}

    run_in_virtual_time(main())


def test_a_version_that_was_never_loaded_makes_room_for_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        setting = Setting(1, Buckets(), directory=tmp_path)
        publisher = setting.publisher
        await publisher.publish(1)
        for version in (2, 3):
            await publisher.gather(version)
            assert await publisher.send(version)
        assert versions_in(tmp_path) == {"v1", "v3"}
        await publisher.load()
        assert await setting.versions_served() == {3}

    run_in_virtual_time(main())


def test_without_a_double_buffer_the_served_version_makes_room_and_an_engine_that_joins_waits_for_the_next(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        setting = Setting(1, Buckets(), directory=tmp_path, double_buffer=False)
        publisher = setting.publisher
        await publisher.publish(1)
        await publisher.gather(2)
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(publisher.send(2))
            await asyncio.sleep(1.0)
            assert not sending.done() and versions_in(tmp_path) == {"v2"}, "one version at a time"
            joining = tasks.create_task(setting.client.add_engine(Troubled("engine-9")))
            await asyncio.sleep(100.0)
            assert sending.done() and not joining.done(), "it waits for the version that is being sent"
            await publisher.load()
        assert await setting.versions_served() == {2} and len(setting.client.engines) == 2

    run_in_virtual_time(main())


def test_an_engine_that_loaded_what_another_refused_is_closed_where_nothing_is_kept_to_go_back_to(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        setting = Setting(2, Buckets(), directory=tmp_path, double_buffer=False)
        await setting.publisher.publish(1)
        setting.engines[0].plan = {"load": ["refuse"]}
        with pytest.raises(PublishError, match="engine-0 refused version 2 .* still serves version 1"):
            await setting.publisher.publish(2)
        assert setting.client.engines == (setting.engines[0],) and setting.engines[1]._cut_off.reason
        assert await setting.versions_served() == {1}

    run_in_virtual_time(main())


def test_a_copy_that_is_lost_with_its_workers_is_skipped_for_a_newer_one_comes(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Buckets()
        setting = Setting(1, policy, directory=tmp_path)
        await setting.publisher.publish(1)
        policy.failures["send", 2] = WeightsLostError("the copy of version 2 is gone")
        await setting.publisher.gather(2)
        assert not await setting.publisher.send(2)
        assert await setting.publisher.load() is None and versions_in(tmp_path) == {"v1"}
        await setting.publisher.publish(3)
        assert await setting.versions_served() == {3}

    run_in_virtual_time(main())


def test_weights_that_do_not_fit_twice_are_refused_before_any_is_sent(tmp_path: Path) -> None:
    class Huge(Buckets):
        async def gather_weights(self, version: int) -> int:
            return 1 << 50

    async def main() -> None:
        setting = Setting(1, Huge(), directory=tmp_path)
        await setting.publisher.publish(0)

    with pytest.raises(
        ConfigError, match="weight_sync.double_buffer must be false, got true: 2 versions of the weights"
    ):
        run_in_virtual_time(main())
    assert files(tmp_path) == set()
