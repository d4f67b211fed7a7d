"""The pieces of a lossless resume: generations that begin with tokens, engines that say what they hold, episodes, samples."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.checkpoint.columns_file import ColumnsWriter, read_columns, with_columns
from skyrl_async.checkpoint.files import write_json_list
from skyrl_async.errors import CheckpointError, EngineDeadError, GenerationError
from skyrl_async.generators.gym.episode_state import EpisodeState
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.generation import GenerationState, OpenCalls
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.group_state import ResumeCounts, SampleState, SampleStates
from skyrl_async.rollout.sampler import OpenGeneration
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.faults import FaultyEngine
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.types import (
    Completion,
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    Prompt,
    SamplingParams,
    Trajectory,
    WeightUpdate,
)
from tests.cpu.tiny_chat import END, RENDERER, TOKENIZER, spelled


class LetterTokenizer:
    """Token i is a letter."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + i % 26) for i in token_ids)


def engine(name: str = "e0", num_tokens: int = 200) -> ModelledEngine:
    return ModelledEngine(name, num_tokens_of=lambda prompt, seed: num_tokens, tokens_per_second=100)


def client(*engines: InferenceEngine, **options: Any) -> InferenceEngineClient:
    return InferenceEngineClient(engines, tokenizer=LetterTokenizer(), max_model_len=1000, **options)


def read_back(value: Any) -> Any:
    """As the files of a checkpoint give it back."""
    with TemporaryDirectory() as directory:
        written, columns = Path(directory) / "value.json", Path(directory) / "columns.arrow"
        with ColumnsWriter(columns) as writer:
            write_json_list(written, [value], writer)
        (read,) = with_columns(json.loads(written.read_text()), read_columns(columns))
    return read


def sampled(token_ids: Sequence[int], version: int = 7, finish_reason: FinishReason | None = None) -> EngineOutput:
    n = len(token_ids)
    return EngineOutput(
        token_ids=tuple(token_ids),
        logprobs=(-1.0,) * n,
        versions=(version,) * n,
        finish_reason=finish_reason,
        num_aborts=2,
    )


async def publish(served: ModelledEngine, version: int, mode: PauseMode = PauseMode.ABORT) -> None:
    await served.pause(mode)
    await served.load_weights(WeightUpdate(version=version, path="", manifest={}, num_bytes=0))
    await served.resume()


@given(num_begun=st.integers(0, 250), stop=st.sampled_from([(), ("hij",), ("xyzabc",)]), budget=st.integers(1, 250))
def test_a_generation_begun_with_its_first_tokens_ends_like_the_whole_one(
    num_begun: int, stop: tuple[str, ...], budget: int
) -> None:
    sampling = SamplingParams(max_tokens=budget, stop=stop)

    async def main() -> tuple[Completion, Completion]:
        whole = await client(engine()).generate_tokens((1, 2), sampling)
        # What an engine holds may go past a stop string, but never past the budget or the answer's end.
        first = [i % 100 for i in range(min(num_begun, budget, 200))]
        end = FinishReason.STOP if len(first) == 200 else FinishReason.LENGTH if len(first) == budget else None
        begin = OpenGeneration(sampled(first, finish_reason=end))
        served = engine(num_tokens=300 if end is FinishReason.STOP else 200)  # would go on, if it were asked
        again = await client(served).generate_tokens((1, 2), sampling, generation=begin)
        return whole, again

    whole, again = run_in_virtual_time(main())
    assert replace(again, versions=whole.versions, num_aborts=whole.num_aborts) == whole
    num_first = min(num_begun, len(again.token_ids))
    assert tuple(again.versions) == (7,) * num_first + (0,) * (len(again.token_ids) - num_first)


class Lingering(ModelledEngine):
    """Hands over its last block, or says that none comes after it, ten seconds late."""

    def __init__(self, *, hands_over: bool) -> None:
        super().__init__("e0", num_tokens_of=lambda prompt, seed: 200, tokens_per_second=100)
        self._hands_over = hands_over

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        async for block in super().stream(request):
            if block.finish_reason is not None and not self._hands_over:
                await asyncio.sleep(10)
            yield block
        await asyncio.sleep(10)


@pytest.mark.parametrize("hands_over", [False, True], ids=["the engine holds its end", "the client holds its end"])
@pytest.mark.parametrize("budget", [150, 500])
def test_contract_7_an_answer_that_has_ended_and_is_not_returned_yet_does_not_go_on_after_a_resume(
    hands_over: bool, budget: int
) -> None:
    sampling = SamplingParams(max_tokens=budget, stop=("never",))

    async def main() -> tuple[Completion, Completion]:
        user, state = client(Lingering(hands_over=hands_over)), EpisodeState(messages=[])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(user.generate_tokens((1, 2), sampling, generation=state.generation))
            await asyncio.sleep(5)
            assert not running.done()
            await user.collect_open_tokens()
            saved = state.sample_state()
        assert saved is not None and saved.num_tokens == min(budget, 200)
        state = EpisodeState.from_json(read_back(saved.state))
        talkative = client(engine(num_tokens=400))
        again = await talkative.generate_tokens((1, 2), sampling, generation=state.generation)
        return running.result(), again

    whole, again = run_in_virtual_time(main())
    assert again == whole
    assert whole.finish_reason is (FinishReason.LENGTH if budget == 150 else FinishReason.STOP)


def test_calls_of_an_engine_that_have_ended_say_so_and_those_cut_at_a_stop_string_do_not() -> None:
    """A stop string is in the tokens, and found in them again; an end token is none of the text."""
    sampling = SamplingParams(max_tokens=50)
    calls, request = OpenCalls(), EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    with calls.tracking(request) as joined:
        joined.add(sampled(range(5)))
        assert calls.partial_outputs(["r"])["r"].finish_reason is None
        joined.add(sampled(range(5), finish_reason=FinishReason.STOP))
        assert calls.partial_outputs(["r"])["r"].finish_reason is FinishReason.STOP
        joined.truncate(3)
        assert calls.partial_outputs(["r"])["r"] == replace(sampled(range(3)), num_aborts=4)


@pytest.mark.parametrize("num_calls", [1, 2], ids=["in its first engine", "in its second engine"])
def test_aborts_that_blocks_have_told_are_counted_once_in_what_the_engine_holds(num_calls: int) -> None:
    sampling = SamplingParams(max_tokens=50)
    state, request = GenerationState(), EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    for number in range(num_calls):
        assert state.next_call(request) is not None
        if number + 1 < num_calls:
            state.add(sampled(range(3), finish_reason=FinishReason.ABORT))  # 2 aborts, and the one at its end
    state.add(sampled(range(3)))
    state.set_engine_output({state.call_id or "": sampled(range(5))})
    partial = state.partial_output()
    assert (len(partial.token_ids), partial.num_aborts) == ((5, 2) if num_calls == 1 else (8, 5))


def test_numbers_of_any_kind_are_saved_and_what_cannot_be_is_named() -> None:
    assert read_back({"reward": np.float32(0.5), "turns": np.int64(2)}) == {"reward": 0.5, "turns": 2}
    with pytest.raises(CheckpointError, match="numbers, text and columns only, got .1. of set: look at the rewards"):
        read_back({"logs": {1}})


def test_a_checkpoint_of_a_generation_that_goes_on_after_an_abort_has_the_abort() -> None:
    state, request = (
        GenerationState(),
        EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9)),
    )
    state.next_call(request)
    state.add(replace(sampled(range(3), finish_reason=FinishReason.ABORT), num_aborts=0))
    assert state.next_call(request) is not None
    assert state.partial_output().num_aborts == 1


def test_a_generation_that_cannot_be_continued_restarts_and_is_not_tracked() -> None:
    sampling = SamplingParams(max_tokens=50, presence_penalty=1.0)
    generation = OpenGeneration(sampled(range(10)))

    async def main() -> Completion:
        return await client(engine()).generate_tokens((1,), sampling, generation=generation)

    assert set(run_in_virtual_time(main()).versions) == {0}
    assert generation.partial_output().token_ids.tolist() == list(range(10))


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("stop", [(), ("never",)], ids=["whole", "streamed"])
@given(
    looks=st.lists(st.floats(0.0, 0.8), min_size=1, max_size=4),
    publish_at=st.floats(0.1, 1.5),
    removed=st.sampled_from([None, "e0", "e1"]),
)
def test_the_tokens_read_at_any_moment_are_a_prefix_of_the_completion(
    mode: PauseMode, stop: tuple[str, ...], looks: list[float], publish_at: float, removed: str | None
) -> None:
    async def main() -> tuple[list[EngineOutput], list[EngineOutput], Completion]:
        served = [engine("e0"), engine("e1")]
        user, generation = client(*served), OpenGeneration(sampled(range(20)))
        before, after = [], []
        async with asyncio.TaskGroup() as tasks:
            sampling = SamplingParams(max_tokens=150, stop=stop)
            running = tasks.create_task(user.generate_tokens((1,), sampling, generation=generation))

            async def publishing() -> None:
                await asyncio.sleep(publish_at)
                for one in served:
                    await publish(one, 8, mode)
                if removed is not None:
                    await user.remove_engine(removed)

            tasks.create_task(publishing())
            for seconds in looks:
                await asyncio.sleep(seconds)
                before.append(generation.partial_output())
                await user.collect_open_tokens()
                after.append(generation.partial_output())
        return before, after, running.result()

    before, after, completion = run_in_virtual_time(main())
    for known, collected in zip(before, after, strict=True):
        n = len(collected.token_ids)
        assert 20 <= len(known.token_ids) <= n
        assert collected.finish_reason == (completion.finish_reason if n == len(completion.token_ids) else None)
        assert np.array_equal(collected.token_ids, completion.token_ids[:n])
        assert collected.versions == completion.versions[:n]
        assert len(collected.logprobs) == n
    if looks[0] < publish_at:
        assert len(after[0].token_ids) >= min(150, 20 + int(100 / (1 + 1 / 170) * looks[0])), "nothing but half a token"


@pytest.mark.parametrize("is_frozen", [False, True], ids=["dead", "frozen, then killed"])
def test_an_engine_that_dies_when_it_is_asked_for_tokens_is_dropped(is_frozen: bool) -> None:
    async def main() -> tuple[Completion, int]:
        first, second = FaultyEngine(engine("e0")), engine("e1")
        user, generation = client(first, second), OpenGeneration()
        async with asyncio.TaskGroup() as tasks:
            sampling = SamplingParams(max_tokens=100)
            running = tasks.create_task(user.generate_tokens((1,), sampling, generation=generation))
            await asyncio.sleep(0.5)
            if is_frozen:
                first.freeze()
                asyncio.get_running_loop().call_later(1.0, first.kill)
            else:
                first.kill()
            await user.collect_open_tokens()
        return running.result(), len(user.engines)

    completion, num_engines = run_in_virtual_time(main())
    assert len(completion.token_ids) == 100 and num_engines == 1


def test_a_dead_engine_raises_when_asked_for_partial_outputs() -> None:
    async def main() -> None:
        dead = engine()
        dead.kill()
        with pytest.raises(EngineDeadError):
            await dead.partial_outputs(["r"])

    run_in_virtual_time(main())


class Asked(ModelledEngine):
    """Notes what it is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[str] = []

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        self.asked += request_ids
        return await super().partial_outputs(request_ids)


def test_a_checkpoint_asks_each_engine_for_its_own_requests_alone() -> None:
    async def main() -> tuple[list[Asked], list[OpenGeneration]]:
        engines = [Asked(f"e{i}", num_tokens_of=lambda prompt, seed: 200, tokens_per_second=100) for i in range(3)]
        user, generations = client(*engines), [OpenGeneration() for _ in range(12)]
        async with asyncio.TaskGroup() as tasks:
            for generation in generations:
                sampling = SamplingParams(max_tokens=500)
                tasks.create_task(user.generate_tokens((1,), sampling, generation=generation))
            await asyncio.sleep(1)
            await user.collect_open_tokens()
            assert all(len(generation.partial_output().token_ids) > 50 for generation in generations)
        return engines, generations

    engines, generations = run_in_virtual_time(main())
    assert [len(engine.asked) for engine in engines] == [4, 4, 4]
    assert len({request for engine in engines for request in engine.asked}) == len(generations)


ROW = Trajectory(
    prompt_token_ids=(1,),
    response_token_ids=(2, 3),
    loss_mask=(1, 1),
    logprobs=(-1.0, -1.0),
    versions=(0, 0),
    reward=1.0,
)
STATE = SampleState(state={"kind": "x"}, num_tokens=5)


def test_saved_samples_count_what_goes_on_what_begins_anew_and_what_that_loses() -> None:
    counts = ResumeCounts()
    lost = SampleState(num_tokens=7)
    samples = SampleStates(
        {0: STATE, 1: SampleState(rows=(ROW,), num_tokens=2), 2: lost, 3: STATE}, num_samples=5, counts=counts
    )
    assert (counts.restarted_trajectories, counts.lost_tokens) == (2, 7)
    assert samples.restore(0) is STATE and samples.restore(1).rows == (ROW,)
    assert samples.restore(0) is None and samples.restore(2) is None and samples.restore(4) is None
    assert counts.resumed_trajectories == 2
    assert samples.snapshot().keys() == {0, 1, 3}
    samples.discard(0)
    samples.count_resampled(1)
    assert counts == ResumeCounts(resumed_trajectories=1, restarted_trajectories=3, lost_tokens=13)
    assert samples.snapshot().keys() == {1, 3}
    samples.close()
    assert counts == ResumeCounts(resumed_trajectories=1, restarted_trajectories=4, lost_tokens=18)


def test_the_state_of_a_sample_is_the_one_set_last() -> None:
    samples = SampleStates({0: STATE}, num_samples=1)
    samples.restore(0)
    assert samples.snapshot() == {0: STATE}
    now: list[SampleState | None] = [None]
    samples.track(0, lambda: now[0])
    assert samples.snapshot() == {}
    now[0] = SampleState(state={}, num_tokens=9)
    assert samples.snapshot()[0].num_tokens == 9
    samples.finish(0, (ROW,))
    assert samples.snapshot()[0] == SampleState(rows=(ROW,), num_tokens=2)


class Sums:
    """Blocking; asks three questions, and remembers the answers. Its steps can be held up."""

    made: "list[Sums]" = []

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.calls: list[str] = []
        self.made.append(self)

    def init(self, prompt: list) -> tuple[list, dict]:
        self.calls.append("init")
        return [*prompt, {"role": "user", "content": "1"}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.calls.append(f"step {action}")
        self.answers.append(action)
        done = len(self.answers) == 3
        asked = [] if done else [{"role": "user", "content": str(len(self.answers))}]
        return {"observations": asked, "reward": 1.0, "done": done}

    def get_metrics(self) -> dict[str, Any]:
        return {"answers": float(len(self.answers))}

    def close(self) -> None:
        self.calls.append("close")


class RestorableSums(Sums):
    made: "list[Sums]" = []

    def snapshot(self) -> dict[str, Any]:
        return {"answers": self.answers}

    def restore(self, state: dict[str, Any]) -> None:
        self.calls.append("restore")
        self.answers = state["answers"]


class StoppingSampler:
    """Says a line per turn; stops for ever at turn ``stuck_at`` after some of its tokens."""

    max_model_len = 1000

    def __init__(self, stuck_at: int | None = None) -> None:
        self.begun: list[tuple[int, ...]] = []
        self._stuck_at = stuck_at
        self.is_stuck = asyncio.Event()

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
        generation: OpenGeneration | None = None,
    ) -> Completion:
        turn = TOKENIZER.decode(list(prompt_token_ids)).count("assistant") - 1
        line = f"answer {turn}"
        ids = (*spelled(line), END)
        if generation is not None:
            self.begun.append(tuple(generation.begin.token_ids))
        if self._stuck_at == turn:
            assert generation is not None
            generation.partial_output = lambda: sampled(ids[:4])
            self.is_stuck.set()
            await asyncio.Event().wait()
        n = len(ids)
        return Completion(
            prompt_token_ids=tuple(prompt_token_ids),
            token_ids=ids,
            logprobs=(-1.0,) * n,
            versions=(0,) * n,
            text=line,
            finish_reason=FinishReason.STOP,
        )


def request(saved: SampleStates, num_samples: int = 1, **options: Any) -> GroupRequest:
    prompt = Prompt(uid="u", messages=({"role": "user", "content": "go"},), env_class="sums")
    sampling = SamplingParams(max_tokens=50)
    return GroupRequest(prompt=prompt, num_samples=num_samples, sampling=sampling, sample_states=saved, **options)


async def stopped_at(turn: int, environment: type[Sums]) -> dict[int, SampleState]:
    """Where an episode stands that is cut off while it samples a turn; as a file gives it back."""
    environment.made.clear()
    sampler, samples = StoppingSampler(turn), SampleStates()
    generator = GymGenerator(sampler, RENDERER, lambda name, extras: environment())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generator.generate(request(samples)))
        await sampler.is_stuck.wait()
        found = samples.snapshot()
        running.cancel()
    environment.made.clear()
    return {i: SampleState(**read_back(asdict(sample))) for i, sample in found.items()}


async def play(saved: SampleStates, environment: type[Sums]) -> tuple[StoppingSampler, Trajectory]:
    sampler = StoppingSampler()
    generator = GymGenerator(sampler, RENDERER, lambda name, extras: environment())
    (row,) = await generator.generate(request(saved))
    return sampler, row


@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_an_episode_of_a_restorable_environment_goes_on_in_the_turn_it_was_in(turn: int) -> None:
    _, whole = await play(SampleStates(), RestorableSums)
    counts = ResumeCounts()
    saved = await stopped_at(turn, RestorableSums)
    sampler, row = await play(SampleStates(saved, num_samples=1, counts=counts), RestorableSums)
    assert row == whole and row.metrics == {"answers": 3.0} and row.reward == 3.0
    assert [len(begin) for begin in sampler.begun] == [4] + [0] * (2 - turn)
    (made,) = RestorableSums.made
    assert made.calls[0] == "restore" and len([c for c in made.calls if c.startswith("step")]) == 3 - turn
    assert counts == ResumeCounts(resumed_trajectories=1)


@pytest.mark.parametrize(("turn", "lost"), [(0, 0), (1, 13), (2, 22)])
async def test_an_episode_of_another_environment_goes_on_in_its_first_turn_only(turn: int, lost: int) -> None:
    _, whole = await play(SampleStates(), Sums)
    counts = ResumeCounts()
    sampler, row = await play(SampleStates(await stopped_at(turn, Sums), num_samples=1, counts=counts), Sums)
    assert row == whole
    (made,) = Sums.made
    assert made.calls[0] == "init"
    assert len(sampler.begun[0]) == (4 if turn == 0 else 0)
    assert counts == ResumeCounts(
        resumed_trajectories=int(turn == 0), restarted_trajectories=int(turn > 0), lost_tokens=lost
    )


class Changed(Sums):
    made: "list[Sums]" = []

    def init(self, prompt: list) -> tuple[list, dict]:
        return [*prompt, {"role": "user", "content": "2"}], {}


class Broken(RestorableSums):
    made: "list[Sums]" = []

    def restore(self, state: dict[str, Any]) -> None:
        raise RuntimeError("the door is locked")


@pytest.mark.parametrize(
    ("environment", "before", "reason"),
    [(Changed, Sums, "opens the conversation otherwise"), (Broken, RestorableSums, "the door is locked")],
    ids=["opens otherwise", "cannot restore"],
)
async def test_an_episode_that_cannot_go_on_begins_anew_says_why_and_is_counted(
    environment: type[Sums], before: type[Sums], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts = ResumeCounts()
    sampler, row = await play(SampleStates(await stopped_at(0, before), num_samples=1, counts=counts), environment)
    assert row.reward == 3.0 and sampler.begun == [(), (), ()]
    assert counts == ResumeCounts(restarted_trajectories=1, lost_tokens=4)
    assert "sample 0 of u begins anew" in caplog.text and reason in caplog.text


async def test_the_state_of_another_generator_begins_anew() -> None:
    counts = ResumeCounts()
    _, row = await play(
        SampleStates({0: SampleState(state={"mine": 1}, num_tokens=3)}, num_samples=1, counts=counts), Sums
    )
    assert row.reward == 3.0 and counts.lost_tokens == 3


async def test_finished_samples_of_a_running_group_are_not_generated_again() -> None:
    counts = ResumeCounts()
    samples = SampleStates({0: SampleState(rows=(ROW,), num_tokens=2)}, num_samples=1, counts=counts)
    sampler, row = await play(samples, Sums)
    assert row is ROW and not sampler.begun and counts == ResumeCounts(resumed_trajectories=1)


async def test_tokens_that_a_sampler_does_not_go_on_from_are_counted() -> None:
    saved = await stopped_at(0, Sums)
    other = asdict(sampled(spelled("other")))
    state = {**saved[0].state, "generation": read_back(other)}
    counts = ResumeCounts()
    await play(SampleStates({0: replace(saved[0], state=state)}, num_samples=1, counts=counts), Sums)
    assert counts == ResumeCounts(resumed_trajectories=1, lost_tokens=5)


class Unsayable(RestorableSums):
    def snapshot(self) -> Any:
        return {1, 2}


async def test_a_snapshot_that_is_no_json_is_named() -> None:
    with pytest.raises(GenerationError, match="Unsayable.snapshot must return JSON"):
        await play(SampleStates(), Unsayable)


async def test_an_episode_whose_turn_the_environment_is_answering_is_kept_with_that_turn() -> None:
    sampler, state = StoppingSampler(), EpisodeState()
    seen: list[SampleState | None] = []

    class Looking(RestorableSums):
        def step(self, action: str) -> dict[str, Any]:
            seen.append(samples.snapshot().get(0))
            return super().step(action)

    samples = SampleStates()
    generator = GymGenerator(sampler, RENDERER, lambda name, extras: Looking())
    (whole,) = await generator.generate(request(samples))
    for number, sample in enumerate(seen):
        assert sample is not None and sample.state is not None
        state = EpisodeState.from_json(read_back(sample.state))
        assert state.turn is not None and state.turn.text == f"answer {number}"
        again, row = await play(SampleStates({0: sample}, num_samples=1), RestorableSums)
        assert row == whole and len(again.begun) == 2 - number
