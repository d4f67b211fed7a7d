"""Engines in Ray actors: real Ray, real vLLM, real processes."""

import asyncio
import contextlib
import pickle
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray

from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.errors import EngineDeadError, EngineStartError, PromptTooLongError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engine_life import EngineLife
from skyrl_async.inference.engines.ray import RayEngine, start_ray_engines
from skyrl_async.inference.vllm.engine import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.tasks.tiny_policy import PolicySizes, build_tiny_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.policy_workers import PolicyWorkers
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, PauseMode, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.broadcast import WeightBroadcast
from skyrl_async.weight_sync.publisher import PublishTimes, WeightPublisher
from tests.engine_checks import (
    follow,
    make_policy,
    make_request,
    make_update,
    publish,
    tokens_of,
    wait_for_blocks,
)
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


MAX_MODEL_LEN = 2048
LONG = MAX_MODEL_LEN - 10
"""Tokens of an answer that is still running when a test on a busy machine comes to interrupt it."""
RESTARTS = EngineConfig(heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, max_restarts=1, restart_backoff_s=0.0)


def engine_processes(log_dir: Path) -> set[psutil.Process]:
    """Every process on the machine that writes to an engine log under ``log_dir``."""
    found = set()
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(log_dir):
                found.add(process)
        except OSError:
            continue
    return found


def what_became_of(pid: int) -> str:
    """A process's state, and what each of its threads waits for in the kernel."""
    try:
        threads = [f"{path.parent.name}:{path.read_text()}" for path in Path(f"/proc/{pid}/task").glob("*/wchan")]
        return f"{psutil.Process(pid).status()} {threads}"
    except (psutil.Error, OSError):
        return "gone"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), seed=0, is_tied=False, max_model_len=MAX_MODEL_LEN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_engines(
    ray_session: None, policy_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[RayEngine]]:
    """Two engines; the tests of their deaths come last."""
    configs = [VLLMEngineConfig(name=f"engine-{i}", policy_dir=str(policy_dir), version=2) for i in range(2)]
    log_dir = tmp_path_factory.mktemp("logs")
    engines = await start_ray_engines(configs, log_dir=log_dir)
    yield engines
    processes = engine_processes(log_dir)
    for engine in engines:
        await engine.close()
        await engine.close()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


@pytest_asyncio.fixture(loop_scope="module")
async def engines(started_engines: list[RayEngine]) -> AsyncIterator[list[RayEngine]]:
    """The two engines, resumed after a test that failed while they were paused."""
    yield started_engines
    for engine in started_engines:
        with contextlib.suppress(EngineDeadError):
            await engine.resume()


async def collect(engine: RayEngine, request: EngineRequest) -> list[EngineOutput]:
    return [block async for block in engine.stream(request)]


async def test_engines_on_the_same_weights_agree_whole_and_streamed_also_after_pickling(
    engines: list[RayEngine],
) -> None:
    first = pickle.loads(pickle.dumps(engines[0]))
    expected = await first.generate(make_request("a"))
    assert len(expected.token_ids) == 64 and set(expected.versions) == {2}
    assert await engines[1].generate(make_request("a")) == expected
    blocks = await collect(engines[1], make_request("b"))
    assert len(blocks) > 3
    assert tokens_of(blocks) == expected.token_ids.tolist()
    assert np.concatenate([block.logprobs for block in blocks]).tolist() == expected.logprobs.tolist()
    assert [block.finish_reason for block in blocks] == [None] * (len(blocks) - 1) + [FinishReason.LENGTH]
    assert await first.checksum() == await engines[1].checksum()
    assert (first.name, first.max_model_len, await first.version()) == ("engine-0", MAX_MODEL_LEN, 2)


async def test_engines_do_not_draw_each_others_samples(engines: list[RayEngine]) -> None:
    drawn = [
        [await engine.generate(make_request(str(i), max_tokens=12, temperature=1.0)) for i in range(8)]
        for engine in engines
    ]
    tokens = [tuple(output.token_ids) for outputs in drawn for output in outputs]
    assert len(set(tokens)) == len(tokens)


async def test_what_a_pause_aborts_goes_on_inside_the_engine_and_new_requests_wait(engines: list[RayEngine]) -> None:
    engine, length = engines[0], 1000
    expected = await engines[1].generate(make_request("expected", max_tokens=length))
    calls = [asyncio.ensure_future(engine.generate(make_request(str(i), max_tokens=length))) for i in range(3)]
    await wait_for_blocks(engine, 1, num_others=3)
    blocks = []
    async for block in engine.stream(make_request("stream", max_tokens=length)):
        blocks.append(block)
        if len(blocks) <= 3:
            await engine.pause(PauseMode.ABORT)
            late = asyncio.ensure_future(engine.generate(make_request("late", max_tokens=5)))
            await engine.version()
            assert not late.done()
            held = await engine.partial_outputs(["0", "1", "2", "stream", "gone"])
            assert held.keys() == {"0", "1", "2", "stream"}
            for known in held.values():
                n = len(known.token_ids)
                assert n > 0 and known.token_ids.tolist() == expected.token_ids[:n].tolist()
                assert tuple(known.versions) == (2,) * n
                assert len(known.logprobs) == n and known.finish_reason is None
            await engine.resume()
            assert (await late).token_ids.tolist() == expected.token_ids[:5].tolist()
    assert tokens_of(blocks) == expected.token_ids.tolist()
    assert sum(block.num_aborts for block in blocks) == 3
    assert [block.finish_reason for block in blocks] == [None] * (len(blocks) - 1) + [FinishReason.LENGTH]
    for output in [await call for call in calls]:
        assert output.token_ids.tolist() == expected.token_ids.tolist() and output.finish_reason is FinishReason.LENGTH
        assert 1 <= output.num_aborts <= 3
        assert np.abs(output.logprobs - expected.logprobs).max() < 1e-4


@pytest.mark.parametrize("mode", PauseMode)
async def test_what_is_evicted_comes_back_with_its_tokens_and_goes_on_in_another_engine(
    engines: list[RayEngine], mode: PauseMode
) -> None:
    """Also a request that was continued in its engine before; what is not evicted stays."""
    engine, other = engines
    staying, moving = make_request("s.1", max_tokens=1000), make_request("s", max_tokens=LONG)
    stays, moves = (asyncio.ensure_future(engine.generate(request)) for request in (staying, moving))
    await wait_for_blocks(engine, 1, num_others=2)
    blocks = []
    async for block in engine.stream(make_request("stream", max_tokens=LONG)):
        blocks.append(block)
        if len(blocks) <= 2:
            await engine.pause(mode)
            if len(blocks) == 2:
                await engine.evict(["s", "stream", "gone"])
            await engine.resume()
    moved = await moves
    num_tokens = max(1000, len(moved.token_ids) + 50, len(tokens_of(blocks)))
    expected = (await other.generate(make_request("expected", max_tokens=num_tokens))).token_ids.tolist()
    for output, tokens in ((moved, tokens_of([moved])), (blocks[-1], tokens_of(blocks))):
        assert output.finish_reason is FinishReason.ABORT
        assert 0 < len(tokens) < LONG and tokens == expected[: len(tokens)]
    assert len(moved.logprobs) == len(moved.versions) == len(moved.token_ids)
    prompt = make_request("p").prompt_token_ids
    rest = make_request("rest", follow(prompt, moved), max_tokens=num_tokens - len(moved.token_ids))
    assert tokens_of([moved, await other.generate(rest)]) == expected
    assert (await stays).token_ids.tolist() == expected[:1000]
    assert (await engine.statistics())["num_requests"] == 0


async def test_a_resume_comes_after_the_pauses_that_were_cancelled_before_it(engines: list[RayEngine]) -> None:
    engine = engines[0]
    core = psutil.Process((await engine.statistics())["core_process_id"])
    for _ in range(5):
        core.send_signal(signal.SIGSTOP)
        pauses = [asyncio.ensure_future(engine.pause(mode)) for mode in (PauseMode.KEEP, PauseMode.ABORT)]
        await asyncio.wait(pauses, timeout=0.01)
        for pause in pauses:
            pause.cancel()
        await asyncio.wait(pauses)
        resume = asyncio.ensure_future(engine.resume())
        core.send_signal(signal.SIGCONT)
        await resume
        output = await engine.generate(make_request("a", max_tokens=5))
        assert (output.finish_reason, output.num_aborts) == (FinishReason.LENGTH, 0)


async def pause_after_cancelled(engine: RayEngine, call: Coroutine[Any, Any, Any]) -> None:
    """Cancel the call in the midst of what its engine does for it, and then pause."""
    core = psutil.Process((await engine.statistics())["core_process_id"])
    core.send_signal(signal.SIGSTOP)
    calling = asyncio.ensure_future(call)
    await asyncio.wait([calling], timeout=0.1)
    calling.cancel()
    await asyncio.wait([calling])
    pause = asyncio.ensure_future(engine.pause(PauseMode.ABORT))
    core.send_signal(signal.SIGCONT)
    await pause
    assert calling.cancelled()


async def test_a_pause_comes_after_a_load_that_was_cancelled_before_it(
    engines: list[RayEngine], policy_dir: Path, tmp_path: Path
) -> None:
    """By then the engine says which version it holds."""
    engine = engines[0]
    await engine.pause(PauseMode.ABORT)
    await pause_after_cancelled(engine, engine.load_weights(make_update(policy_dir, tmp_path, 3)))
    assert await engine.version() == 3
    await publish(engine, make_update(policy_dir, tmp_path, 2))
    assert set((await engine.generate(make_request("a", max_tokens=5))).versions) == {2}


async def test_a_switch_whose_caller_was_cancelled_ends_before_the_next_pause(
    engines: list[RayEngine], policy_dir: Path, tmp_path: Path
) -> None:
    engine = engines[0]
    await pause_after_cancelled(engine, engine.switch_weights(make_update(policy_dir, tmp_path, 5), PauseMode.ABORT))
    assert await engine.version() == 5
    await engine.switch_weights(make_update(policy_dir, tmp_path, 2), PauseMode.ABORT)
    await engine.resume()
    assert set((await engine.generate(make_request("a", max_tokens=5))).versions) == {2}


async def test_an_eviction_hands_back_what_can_go_on_elsewhere_and_waits_for_the_rest(engines: list[RayEngine]) -> None:
    engine = engines[0]
    await engine.ping()
    calls = [asyncio.ensure_future(engine.generate(make_request(str(i), max_tokens=LONG))) for i in range(3)]
    streaming = asyncio.ensure_future(collect(engine, make_request("stream", max_tokens=LONG)))
    await wait_for_blocks(engine, 1, num_others=4)
    stubborn = asyncio.ensure_future(engine.generate(make_request("stubborn", max_tokens=100, presence_penalty=0.1)))
    await wait_for_blocks(engine, 5)
    await engine.evict()
    assert (await stubborn).finish_reason is FinishReason.LENGTH
    assert (await engine.statistics())["num_requests"] == 0
    outputs, blocks = [await call for call in calls], await streaming
    tokens = tokens_of(blocks)
    num_tokens = max(len(tokens), *(len(output.token_ids) for output in outputs))
    assert num_tokens >= 5
    expected = (await engines[1].generate(make_request("expected", max_tokens=num_tokens))).token_ids.tolist()
    for output in outputs:
        assert (output.finish_reason, output.num_aborts) == (FinishReason.ABORT, 0)
        assert len(output.token_ids) < LONG and output.token_ids.tolist() == expected[: len(output.token_ids)]
        assert len(output.logprobs) == len(output.versions) == len(output.token_ids)
    assert [block.finish_reason for block in blocks] == [None] * (len(blocks) - 1) + [FinishReason.ABORT]
    assert tokens == expected[: len(tokens)]
    await engine.evict()
    assert (await engine.generate(make_request("later", max_tokens=5))).token_ids.tolist() == expected[:5]


async def test_our_errors_cross_ray_as_themselves(engines: list[RayEngine]) -> None:
    with pytest.raises(PublishError, match="not paused") as refused:
        await engines[0].load_weights(WeightUpdate(version=3, path="", manifest={}, num_bytes=0))
    too_long = EngineRequest(
        request_id="x", prompt_token_ids=(5,) * MAX_MODEL_LEN, sampling=SamplingParams(max_tokens=1)
    )
    with pytest.raises(PromptTooLongError) as long:
        await engines[0].generate(too_long)
    assert (type(refused.value), type(long.value)) == (PublishError, PromptTooLongError)
    assert long.value.num_prompt_tokens == MAX_MODEL_LEN


async def test_a_cancelled_call_ends_its_request_in_the_engine(engines: list[RayEngine]) -> None:
    engine = engines[0]
    calls = [asyncio.ensure_future(engine.generate(make_request(str(i), max_tokens=LONG))) for i in range(64)]
    stream = engine.stream(make_request("stream", max_tokens=LONG))
    await anext(stream)
    for call in calls:
        call.cancel()
    await stream.aclose()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    async with asyncio.timeout(PATIENCE_S):
        while (await engine.statistics())["num_requests"]:
            continue


async def test_an_engine_that_does_not_come_up_shows_its_last_log_lines_and_leaves_no_process(
    ray_session: None, policy_dir: Path, tmp_path: Path
) -> None:
    """The bad one is of a model that the engine's kernels cannot run: it dies of its first token."""
    sizes = PolicySizes(hidden_size=64, num_layers=1, num_heads=4, intermediate_size=64)
    build_tiny_policy(tmp_path / "narrow", sizes, train_tokenizer(["Extend 3248 until 0."]), seed=0)
    good = VLLMEngineConfig(name="good", policy_dir=str(policy_dir))
    bad = VLLMEngineConfig(name="bad", policy_dir=str(tmp_path / "narrow"))
    said = r"(?s)engine bad did not come up: .*its first token ended it.*last log lines \([^)]*bad\.log\):.*head_dim=16"
    with pytest.raises(EngineStartError, match=said):
        await start_ray_engines([good, bad], log_dir=tmp_path)
    _, alive = psutil.wait_procs(engine_processes(tmp_path), timeout=PATIENCE_S)
    assert not alive


async def boot_while_killing(policy_dir: Path, log_dir: Path, *, is_core: bool, deaths: int) -> list[RayEngine]:
    """Start an engine with one restart and all CPU slots, and kill its core or its actor so many times while it comes up."""

    async def kill() -> None:
        for _ in range(deaths):
            killed: list[psutil.Process] = []
            while not killed:
                await asyncio.sleep(0.02)
                processes = {process.pid: process for process in engine_processes(log_dir)}
                for process in processes.values():
                    with contextlib.suppress(psutil.Error):
                        if (process.ppid() in processes) is is_core:
                            process.kill()
                            killed.append(process)
            gone = killed if is_core else list(processes.values())  # a core follows its actor
            await asyncio.to_thread(psutil.wait_procs, gone, PATIENCE_S)

    config = VLLMEngineConfig(name="engine-0", policy_dir=str(policy_dir))
    async with asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(kill())
        lives, num_cpus = {"engine-0": EngineLife(RESTARTS)}, ray.cluster_resources()["CPU"]
        engines = await start_ray_engines(
            [config], num_cpus=num_cpus, log_dir=log_dir, lives=lives, start_timeout_s=PATIENCE_S
        )
        await killing
    return engines


async def test_an_engine_whose_core_is_killed_while_it_comes_up_boots_again(
    ray_session: None, policy_dir: Path, tmp_path: Path
) -> None:
    (engine,) = await boot_while_killing(policy_dir, tmp_path, is_core=True, deaths=1)
    assert len((await engine.generate(make_request("a"))).token_ids)
    await engine.close()
    await asyncio.to_thread(psutil.wait_procs, engine_processes(tmp_path), PATIENCE_S)


async def test_an_engine_whose_actor_is_killed_while_it_comes_up_boots_again_as_often_as_its_life_allows(
    ray_session: None, policy_dir: Path, tmp_path: Path
) -> None:
    used_up = pytest.RaisesExc(EngineStartError, match="(?s)come up.*; engine.max_restarts=1 are used up")
    with pytest.RaisesGroup(used_up):
        await boot_while_killing(policy_dir, tmp_path, is_core=False, deaths=2)


async def test_an_engine_that_is_late_is_named_and_killed(ray_session: None, policy_dir: Path, tmp_path: Path) -> None:
    config = VLLMEngineConfig(name="late", policy_dir=str(policy_dir))
    with pytest.raises(EngineStartError, match=r"engine late was not up within 0.1 s \(engine.start_timeout_s\)"):
        await start_ray_engines([config], start_timeout_s=0.1, log_dir=tmp_path)
    _, alive = psutil.wait_procs(engine_processes(tmp_path), timeout=PATIENCE_S)
    assert not alive


async def test_a_resource_that_the_cluster_lacks_is_an_error_at_once(
    ray_session: None, policy_dir: Path, tmp_path: Path
) -> None:
    config = VLLMEngineConfig(name="greedy", policy_dir=str(policy_dir))
    with pytest.raises(EngineStartError, match="need 64 GPUs.*placement.num_gpus_per_engine"):
        await start_ray_engines([config], num_gpus=64, log_dir=tmp_path)


def publisher_of(
    policy: PolicyWorkers, engines: list[RayEngine], directory: Path, *, is_broadcast: bool
) -> WeightPublisher:
    """Engines on the machine of the trainer are sent what they could map."""
    broadcast = WeightBroadcast(
        policy=policy, backend="gloo", must_receive=lambda engine: True, bucket_bytes=100_000, timeout_s=PATIENCE_S
    )
    return WeightPublisher(
        client=InferenceEngineClient(engines, max_model_len=MAX_MODEL_LEN),
        policy=policy,
        directory=directory,
        bucket_bytes=1 << 20,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, time.monotonic),
        broadcast=broadcast if is_broadcast else None,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PolicyWorkers]:
    """Of other weights than the engines boot from."""
    directory = make_policy(tmp_path_factory.mktemp("trained"), seed=1, is_tied=False)
    workers = await PolicyWorkers.start(TrainingSettings(policy_path=str(directory)), num_workers=1)
    yield workers
    await workers.close()


async def answers_until(engine: RayEngine, is_over: asyncio.Event) -> list[EngineOutput]:
    """One answer after the other; the last begins when it is over."""
    answers, is_last = [], False
    while not is_last:
        is_last = is_over.is_set()
        answers.append(await engine.generate(make_request(str(len(answers)), max_tokens=300)))
    return answers


async def test_weights_that_are_broadcast_are_those_that_are_mapped_and_answers_go_on_meanwhile(
    engines: list[RayEngine], policy: PolicyWorkers, policy_dir: Path, tmp_path: Path
) -> None:
    mapping = publisher_of(policy, engines, tmp_path / "mapped", is_broadcast=False)
    await mapping.publish(3)
    expected = await mapping.verifier.verify_checksums(3)
    for engine in engines:
        await publish(engine, make_update(policy_dir, tmp_path, 4))
    assert await engines[0].checksum() != expected
    sending = publisher_of(policy, engines, tmp_path / "sent", is_broadcast=True)
    is_published = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(answers_until(engine, is_published)) for engine in engines]
        for engine in engines:
            await wait_for_blocks(engine, 2, num_others=1)
        await sending.publish(5)
        is_published.set()
    assert await sending.verifier.verify_checksums(5) == expected
    for task in asking:
        assert {len(answer.token_ids) for answer in task.result()} == {300}
        versions = [version for answer in task.result() for version in answer.versions]
        assert versions == sorted(versions) and set(versions) == {4, 5}
    sending.close()
    assert not [path for name in ("mapped", "sent") for path in (tmp_path / name).glob("*5*")]


async def check_death(
    engine: RayEngine, role: str, before: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Kill one of an engine's processes, and see what becomes of calls in flight and later ones."""
    statistics = await engine.statistics()
    pids = {"core": statistics["core_process_id"], "actor": statistics["process_id"]}
    calls = {asyncio.create_task(engine.generate(make_request(str(i), max_tokens=LONG)), name=str(i)) for i in range(3)}
    stream = engine.stream(make_request("stream", max_tokens=LONG))
    await anext(stream)
    if before is not None:
        psutil.Process(pids["core"]).suspend()
        await before()
    psutil.Process(pids[role]).send_signal(signal.SIGKILL)
    calls.add(asyncio.create_task(engine.generate(make_request("just after", max_tokens=64)), name="just after"))
    done, pending = await asyncio.wait(calls, timeout=PATIENCE_S)
    assert not pending, (
        f"the {role} was killed and {sorted(call.get_name() for call in pending)} wait; "
        f"processes: { {name: what_became_of(pid) for name, pid in pids.items()} }"
    )
    assert {type(call.exception()) for call in done} == {EngineDeadError}
    with pytest.raises(EngineDeadError, match=f"engine {engine.name} is gone"):
        async for _ in stream:
            pass
    for call in (engine.pause(PauseMode.ABORT), engine.checksum(), engine.generate(make_request("late"))):
        with pytest.raises(EngineDeadError):
            await call
    core = pids["core"]
    psutil.wait_procs([psutil.Process(core)] if psutil.pid_exists(core) else [], timeout=PATIENCE_S)
    assert not psutil.pid_exists(core)


async def test_a_core_killed_in_a_broadcast_is_an_engine_death_and_the_other_engine_serves_what_was_sent(
    engines: list[RayEngine], policy: PolicyWorkers, tmp_path: Path
) -> None:
    publisher = publisher_of(policy, engines, tmp_path, is_broadcast=True)
    await publisher.publish(6)
    await publisher.gather(7)
    await publisher.send(7)
    loading: list[asyncio.Task[PublishTimes | None]] = []

    async def begin_to_load() -> None:
        loading.append(asyncio.create_task(publisher.load()))
        for _ in range(3):
            await engines[1].statistics()
        assert not loading[0].done(), "it waits for an engine that stands still"

    await check_death(engines[0], "core", begin_to_load)
    times = await loading[0]
    assert times is not None and times.version == await engines[1].version() == 7
    await publisher.publish(8)
    assert await engines[1].version() == 8
    publisher.close()


async def test_a_killed_actor_is_an_engine_death_for_calls_in_flight(engines: list[RayEngine]) -> None:
    await check_death(engines[1], "actor")
