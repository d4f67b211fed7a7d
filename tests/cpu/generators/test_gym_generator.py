"""Episodes through both generators: in process over a sampler, and over HTTP with the real openai client and uvicorn.

The sampler is scripted: it says given lines one byte per token, under known versions and log-probs, so that its text
does not tokenize back to its ids and every number can be checked. The real engine behind both generators is tested
elsewhere.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl_async.chat import ChatRenderer
from skyrl_async.chat.turns import TurnSplitter
from skyrl_async.columns import token_ids
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import GenerationError, NoEngineError, PromptTooLongError
from skyrl_async.generators.gym.generator import GymGenerator, derive_seed
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.sampler import OpenGeneration
from skyrl_async.tasks.registry import make_environment
from skyrl_async.types import (
    ENVIRONMENT_VERSION,
    Completion,
    CompletionDelta,
    FinishReason,
    Prompt,
    SamplingParams,
    ToolCall,
    Trajectory,
)
from skyrl_gym_http import SkyRLGymHTTPGenerator
from tests.cpu.chat_templates import qwen3
from tests.cpu.tiny_chat import END, RENDERER, TOKENIZER, spelled


class ScriptedSampler:
    """Says ``lines`` in turn within each session. Token i of turn t: version t until the second token, then t + 1."""

    def __init__(self, lines: Sequence[str], *, max_model_len: int = 1000, num_aborts: int = 1) -> None:
        self.max_model_len = max_model_len
        self.requests: list[tuple[str | None, int, SamplingParams]] = []
        self._lines = lines
        self._num_aborts = num_aborts

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
        generation: OpenGeneration | None = None,
    ) -> Completion:
        turn = sum(session_id == session for session, _, _ in self.requests)
        self.requests.append((session_id, priority, sampling))
        line = self._lines[turn]
        stops = [line.index(stop) + len(stop) for stop in sampling.stop if stop in line]
        ids = spelled(line[: min(stops)]) if stops else (*spelled(line), END)
        text = line[: line.index(sampling.stop[0])] if stops else line
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Completion(
            prompt_token_ids=token_ids(prompt_token_ids),
            token_ids=ids,
            logprobs=tuple(-(turn + 1) - i / 128 for i in range(len(ids))),
            versions=tuple(turn + (i >= 2) for i in range(len(ids))),
            text=TOKENIZER.decode(ids, skip_special_tokens=True) if is_cut else text,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            num_aborts=self._num_aborts,
            engines=("engine-3",),
            engine_seconds=0.5,
            asked_at=100.0 + turn,
        )

    def stream_tokens(self, *args: Any, **kwargs: Any) -> AsyncIterator[CompletionDelta]:
        raise NotImplementedError


class Quiz(BaseTextEnv):
    """Asks ``again`` until ``num_turns`` actions came; each earns a tenth."""

    is_fast = True

    def __init__(self, num_turns: int = 2, postprocessed: str | None = None) -> None:
        super().__init__()
        self.num_turns = num_turns
        self.postprocessed = postprocessed
        self.actions: list[str] = []
        self.closed = threading.Event()

    def step(self, action: str) -> dict[str, Any]:
        self.actions.append(action)
        is_done = len(self.actions) >= self.num_turns
        return {
            "observations": [] if is_done else [{"role": "user", "content": "again"}],
            "reward": 0.1,
            "done": is_done,
            "metadata": {},
            "postprocessed_action": self.postprocessed,
        }

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": len(self.actions), "won": True, "note": "not a number"}


def request(num_samples: int = 1, **sampling: Any) -> GroupRequest:
    return GroupRequest(
        prompt=Prompt(
            uid="p", messages=({"role": "user", "content": "hello"},), env_class="quiz", extras={"depth": [3]}
        ),
        num_samples=num_samples,
        sampling=SamplingParams(**{"max_tokens": 50, **sampling}),
        seed=11,
        priority=5,
    )


Play = Callable[..., Any]


@pytest.fixture(params=["gym", "gym_http"])
def play(request: pytest.FixtureRequest) -> Play:
    """Plays a group through one of the generators, in environments made by ``make``."""

    @asynccontextmanager
    async def generator(sampler: ScriptedSampler, make: Any, **limits: Any) -> AsyncIterator[Generator]:
        if request.param == "gym":
            yield GymGenerator(sampler, RENDERER, make, **limits)
            return
        async with start_server(create_app(sampler, RENDERER, api_keys=["k"])) as (host, port):
            over_http = SkyRLGymHTTPGenerator(f"http://{host}:{port}/v1", "k", "policy", make, **limits)
            try:
                yield over_http
            finally:
                await over_http.close()

    async def run(
        sampler: ScriptedSampler, make: Any, group_request: GroupRequest, **limits: Any
    ) -> tuple[Trajectory, ...]:
        async with generator(sampler, make, **limits) as playing:
            return await playing.generate(group_request)

    return run


async def play_one(play: Play, sampler: ScriptedSampler, env: BaseTextEnv, **kwargs: Any) -> Trajectory:
    limits = {name: kwargs.pop(name) for name in ("max_turns", "max_trajectory_tokens") if name in kwargs}
    (trajectory,) = await play(sampler, lambda name, extras: env, request(**kwargs), **limits)
    assert env.closed.is_set()
    return trajectory


def masked_runs(trajectory: Trajectory) -> list[tuple[int, tuple[int, ...]]]:
    """(mask, ids) runs of a trajectory's response."""
    runs: list[tuple[int, tuple[int, ...]]] = []
    for mask, token_id in zip(trajectory.loss_mask.tolist(), trajectory.response_token_ids.tolist(), strict=True):
        if runs and runs[-1][0] == mask:
            runs[-1] = (mask, (*runs[-1][1], token_id))
        else:
            runs.append((mask, (token_id,)))
    return runs


GLUE = tuple(TOKENIZER.encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"))


async def test_a_multi_turn_episode_keeps_every_sampled_token_and_masks_the_environments(play: Play) -> None:
    env = Quiz()
    trajectory = await play_one(play, ScriptedSampler(["hello hé", "again"]), env)

    assert np.array_equal(trajectory.prompt_token_ids, RENDERER.render([{"role": "user", "content": "hello"}]))
    first, second = (*spelled("hello hé"), END), (*spelled("again"), END)
    assert spelled("hello hé") != tuple(TOKENIZER.encode("hello hé"))
    assert masked_runs(trajectory) == [(1, first), (0, GLUE), (1, second)]
    assert tuple(trajectory.logprobs) == (
        *(-1 - i / 128 for i in range(len(first))),
        *(0.0,) * len(GLUE),
        *(-2 - i / 128 for i in range(len(second))),
    )
    assert tuple(trajectory.versions) == (
        *(int(i >= 2) for i in range(len(first))),
        *(ENVIRONMENT_VERSION,) * len(GLUE),
        *(1 + int(i >= 2) for i in range(len(second))),
    )
    assert env.actions == ["hello hé", "again"]
    assert trajectory.reward == pytest.approx(0.2)
    assert (trajectory.num_turns, trajectory.num_aborts, trajectory.is_truncated) == (2, 2, False)
    assert trajectory.metrics == {"turns": 2.0, "won": 1.0}


async def test_a_tools_call_and_its_result_are_turns_of_the_row(play: Play) -> None:
    environment = make_environment("calculator", {"reward_spec": {"ground_truth": "42"}})
    sampler = ScriptedSampler(["It is <calc>6*7</calc> so", "#### 42"])
    (trajectory,) = await play(sampler, lambda *_: environment, request())
    turns = TurnSplitter(RENDERER).turns(trajectory)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[1].tool_calls == (ToolCall(name="calculator", arguments="6*7"),) and not turns[3].tool_calls
    assert turns[2].name == "calculator" and "= 42" in turns[2].text
    assert [(turn.engines, turn.engine_seconds) for turn in turns[1::2]] == [(("engine-3",), 0.5)] * 2
    assert [turn.asked_at for turn in turns] == [None, 100.0, None, 101.0]


@pytest.mark.parametrize(
    ("metadata", "call"),
    [
        ({"tool_name": "search", "tool_input": ["who"]}, ToolCall(name="search", arguments='["who"]')),
        ({"tool_name": "search", "tool_input": [None]}, None),
        ({"tool_name": "look", "tool_input": np.arange(3)}, ToolCall(name="look", arguments='"[0 1 2]"')),
        ({"tool_name": "look", "tool_input": {(1, 2): 3}}, ToolCall(name="look", arguments="dict that is no JSON")),
        ({"tool_name": "look"}, None),
        (None, None),
    ],
)
async def test_a_call_is_what_an_environment_says_of_it(metadata: Any, call: ToolCall | None) -> None:
    class Told(Quiz):
        def step(self, action: str) -> dict[str, Any]:
            return super().step(action) | {"metadata": metadata}

    (row,) = await GymGenerator(ScriptedSampler(["hello", "again"]), RENDERER, lambda *_: Told()).generate(request())
    assert row.messages[0].tool_calls == ((call,) if call else ())
    assert row.messages[1].name == (call.name if call else None)


async def test_engine_calls_over_http_are_told_to_the_trainer() -> None:
    calls: list[tuple[str, int, float]] = []
    async with start_server(create_app(ScriptedSampler(["hello", "again"]), RENDERER, api_keys=["k"])) as (host, port):
        url = f"http://{host}:{port}/v1"
        generator = SkyRLGymHTTPGenerator(
            url, "k", "policy", lambda *_: Quiz(), on_call=lambda *call: calls.append(call)
        )
        asked = request()
        await generator.generate(asked)
        await generator.close()
    assert calls == [("engine-3", 6, 0.5)] * 2 and asked.progress.work[0].engines == ("engine-3",)


async def test_an_environment_sees_reasoning_and_may_shorten_what_follows_it() -> None:
    tokenizer = qwen3()
    renderer, written = ChatRenderer(tokenizer), "<think>\nhm\n</think>\n\nyes and more"
    prompt = renderer.render([{"role": "user", "content": "hello"}])
    app = create_app(ScriptedSampler([written]), renderer, api_keys=["k"], parser=AnswerParser.of(tokenizer))
    kept, envs = written.removesuffix(" and more"), [Quiz(1), Quiz(1)]
    for env in envs:
        env.postprocessed = kept
    async with start_server(app) as (host, port):
        over_http = SkyRLGymHTTPGenerator(f"http://{host}:{port}/v1", "k", "policy", lambda *_: envs[0])
        (row,) = await over_http.generate(request())
        await over_http.close()
    (expected,) = await GymGenerator(ScriptedSampler([written]), renderer, lambda *_: envs[1]).generate(request())
    assert [env.actions for env in envs] == [[written]] * 2
    assert tuple(row.prompt_token_ids) == tuple(prompt)
    assert tuple(row.response_token_ids) == tuple(expected.response_token_ids) == spelled(kept)


async def test_a_turn_ended_by_a_stop_string_reaches_the_environment_whole_and_gets_its_end_of_turn(play: Play) -> None:
    env = Quiz()
    trajectory = await play_one(play, ScriptedSampler(["a</s> b", "c"]), env, stop=("</s>",))
    assert env.actions == ["a</s>", "c"]
    assert masked_runs(trajectory)[:2] == [(1, spelled("a</s>")), (0, (END, *GLUE))]


async def test_a_turn_cut_by_max_tokens_goes_on_with_its_end_of_turn_supplied(play: Play) -> None:
    trajectory = await play_one(play, ScriptedSampler(["abcdef", "gh"]), Quiz(), max_tokens=3)
    assert masked_runs(trajectory) == [(1, spelled("abc")), (0, (END, *GLUE)), (1, (*spelled("gh"), END))]
    assert not trajectory.is_truncated


async def test_an_episode_whose_last_turn_was_cut_is_truncated(play: Play) -> None:
    assert (await play_one(play, ScriptedSampler(["abcdef"]), Quiz(1), max_tokens=3)).is_truncated


async def test_the_trajectory_budget_counts_the_environments_tokens(play: Play) -> None:
    budget = 4 + len(GLUE) + 2
    sampler = ScriptedSampler(["abc", "defghi"])
    trajectory = await play_one(play, sampler, Quiz(), max_trajectory_tokens=budget)
    assert len(trajectory.response_token_ids) == budget
    assert masked_runs(trajectory)[-1] == (1, spelled("de"))
    assert trajectory.is_truncated


@pytest.mark.parametrize("budget", [4, 5, 4 + len(GLUE)])
async def test_an_episode_ends_truncated_when_the_next_turn_finds_no_room(play: Play, budget: int) -> None:
    trajectory = await play_one(play, ScriptedSampler(["abc"]), Quiz(), max_trajectory_tokens=budget)
    assert masked_runs(trajectory) == [(1, (*spelled("abc"), END))]
    assert trajectory.is_truncated
    assert trajectory.reward == pytest.approx(0.1)


async def test_the_models_context_bounds_an_episode_too(play: Play) -> None:
    num_prompt = len(RENDERER.render([{"role": "user", "content": "hello"}]))
    sampler = ScriptedSampler(["abc", "defghi"], max_model_len=num_prompt + 4 + len(GLUE) + 2)
    trajectory = await play_one(play, sampler, Quiz())
    assert masked_runs(trajectory)[-1] == (1, spelled("de"))
    assert trajectory.is_truncated


async def test_a_first_prompt_without_room_raises(play: Play) -> None:
    env = Quiz()
    with pytest.raises(PromptTooLongError, match="maximum context length is 4 tokens"):
        await play_one(play, ScriptedSampler(["abc"], max_model_len=4), env)
    assert env.closed.is_set()


async def test_the_number_of_turns_is_bounded_and_the_environment_knows_the_bound(play: Play) -> None:
    told: list[dict[str, Any]] = []
    env = Quiz(num_turns=9)

    def make(name: str, extras: dict[str, Any]) -> Quiz:
        told.append(extras)
        return env

    (trajectory,) = await play(ScriptedSampler(["a", "b", "c"]), make, request(), max_turns=2)
    assert trajectory.num_turns == 2
    assert not trajectory.is_truncated
    assert [{**extras, "seed": 0} for extras in told] == [{"depth": [3], "max_turns": 2, "seed": 0}]


async def test_each_environment_gets_a_seed_of_its_sample_unless_the_row_says_one() -> None:
    told: list[dict[str, Any]] = []

    def make(name: str, extras: dict[str, Any]) -> Quiz:
        told.append(extras)
        return Quiz(1)

    def asked(seed: int, extras: dict[str, Any]) -> GroupRequest:
        prompt = Prompt(uid="p", messages=({"role": "user", "content": "hello"},), env_class="quiz", extras=extras)
        return GroupRequest(prompt=prompt, num_samples=2, sampling=SamplingParams(max_tokens=9), seed=seed)

    for seed, extras in ((1, {}), (1, {}), (2, {}), (2, {"seed": 7})):
        await GymGenerator(ScriptedSampler(["a", "b"]), RENDERER, make).generate(asked(seed, extras))
    first, again, other, own = ({extras["seed"] for extras in told[i : i + 2]} for i in range(0, 8, 2))
    assert first == again and len(first | other) == 4 and own == {7}


async def test_a_shortened_action_keeps_the_sampled_tokens_that_spell_it(play: Play) -> None:
    trajectory = await play_one(play, ScriptedSampler(["hé!xyz", "hé!"]), Quiz(postprocessed="hé!"))
    assert masked_runs(trajectory) == [(1, spelled("hé!")), (0, (END, *GLUE)), (1, (*spelled("hé!"), END))]


async def test_an_action_rewritten_otherwise_stays_as_it_was_sampled(play: Play) -> None:
    trajectory = await play_one(play, ScriptedSampler(["abc"]), Quiz(1, postprocessed="xyz"))
    assert masked_runs(trajectory) == [(1, (*spelled("abc"), END))]


async def test_samples_are_independent_and_carry_their_own_session_seed_and_environment(play: Play) -> None:
    sampler = ScriptedSampler(["a", "b"])
    made: list[dict[str, Any]] = []

    def make(name: str, extras: dict[str, Any]) -> Quiz:
        extras["depth"].append(name)
        made.append(extras)
        return Quiz()

    trajectories = await play(sampler, make, request(num_samples=3))
    assert len(trajectories) == 3
    assert all(extras["depth"] == [3, "quiz"] for extras in made)
    found = {(session, sampling.seed) for session, _, sampling in sampler.requests}
    assert found == {(f"p/11/{i}", derive_seed(11, i, turn)) for i in range(3) for turn in range(2)}
    assert {priority for _, priority, _ in sampler.requests} == {5}


async def test_sampling_parameters_reach_the_sampler_unchanged(play: Play) -> None:
    sampler = ScriptedSampler(["a"])
    await play_one(
        play, sampler, Quiz(1), temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("x", "y"), ignore_eos=True
    )
    expected = SamplingParams(
        max_tokens=50,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        stop=("x", "y"),
        ignore_eos=True,
        seed=derive_seed(11, 0, 0),
    )
    assert [sampling for _, _, sampling in sampler.requests] == [expected]


class Failing(Quiz):
    def step(self, action: str) -> dict[str, Any]:
        raise ZeroDivisionError("the tool broke")


async def test_an_environment_that_raises_ends_the_group_with_its_error_and_closes_every_environment(
    play: Play,
) -> None:
    envs = [Failing(), Quiz(), Quiz()]
    waiting = iter(envs)
    asked = request(num_samples=3)
    with pytest.raises(ZeroDivisionError, match="the tool broke") as caught:
        await play(ScriptedSampler(["a", "b"]), lambda name, extras: next(waiting), asked)
    (lost,) = asked.sample_states.failed[0]
    assert len(lost.response_token_ids) > 0 == lost.num_sampled_tokens and lost.versions.distinct != {
        ENVIRONMENT_VERSION
    }
    assert lost.is_abandoned and lost.logs == {"failure": "ZeroDivisionError: the tool broke"}
    assert caught.value.__notes__ == ["in environment 'quiz', prompt 'p', sample 0"]
    assert all(env.closed.is_set() for env in envs)


class Silent(Quiz):
    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "done": True}


class SpeaksForThePolicy(Quiz):
    def step(self, action: str) -> dict[str, Any]:
        said = [{"role": role, "content": "no"} for role in ("user", "assistant")]
        return {"observations": said, "reward": 0.0, "done": False}


async def test_an_environment_that_breaks_its_protocol_is_named(play: Play) -> None:
    with pytest.raises(GenerationError, match=r"for turn 0 must return observations of another role than assistant"):
        await play_one(play, ScriptedSampler(["a"]), SpeaksForThePolicy())
    with pytest.raises(GenerationError, match=r"Silent.step for turn 0 must return observations, reward and done"):
        await play_one(play, ScriptedSampler(["a"]), Silent())


class Judge(Quiz):
    """Rewards each token of the first turn, and later turns as a whole."""

    def __init__(self, *rewards: float) -> None:
        super().__init__()
        self.rewards = list(rewards)

    def step(self, action: str, token_ids: Any) -> dict[str, Any]:
        assert TOKENIZER.decode(token_ids, skip_special_tokens=True) == action
        return super().step(action) | {"reward": self.rewards if len(self.actions) == 1 else 0.5}


async def test_an_environment_may_reward_each_token_that_it_is_shown(play: Play) -> None:
    row = await play_one(play, ScriptedSampler(["abc", "d"]), Judge(0.0, 0.25, -0.5, 0.75))
    assert row.token_rewards is not None and row.token_rewards.dtype == np.float32
    assert row.token_rewards[row.loss_mask].tolist() == [0.0, 0.25, -0.5, 0.75, 0.0, 0.5]
    assert not row.token_rewards[~row.loss_mask].any()
    assert (row.reward, row.turn_rewards) == (1.0, (0.5, 0.5))


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ((1.0,), r"rewards of turn 0 must be one per sampled token that is kept \(4\), got 1"),
        (
            (0.0, 1.0, np.nan, 0.0),
            r"Judge.step for turn 0 must return finite numbers \(float32\) as rewards of tokens, got nan for token 2",
        ),
    ],
)
async def test_rewards_that_are_not_one_number_per_token_are_refused_with_their_sample(
    play: Play, rewards: tuple[float, ...], complaint: str
) -> None:
    with pytest.raises(GenerationError, match=complaint) as caught:
        await play_one(play, ScriptedSampler(["abc", "d"]), Judge(*rewards))
    assert caught.value.__notes__ == ["in environment 'quiz', prompt 'p', sample 0"]


async def test_a_reward_of_a_later_turn_that_is_not_finite_is_named_with_its_turn(play: Play) -> None:
    class Late(Quiz):
        def step(self, action: str) -> dict[str, Any]:
            return super().step(action) | {"reward": np.inf if len(self.actions) == 2 else 0.5}

    with pytest.raises(GenerationError, match=r"Late.step for turn 1 must return a finite number as reward, got inf"):
        await play_one(play, ScriptedSampler(["a", "b"]), Late())


async def test_a_failing_sampler_is_not_swallowed(play: Play) -> None:
    class Deserted(ScriptedSampler):
        async def generate_tokens(self, *args: Any, **kwargs: Any) -> Completion:
            raise NoEngineError("no engine is left")

    with pytest.raises((NoEngineError, GenerationError), match="no engine is left"):
        await play_one(play, Deserted([]), Quiz())


class Slow(Quiz):
    """Blocks in ``step`` until released, as a tool would."""

    is_fast = False

    def __init__(self) -> None:
        super().__init__(1)
        self.entered = threading.Event()
        self.released = threading.Event()
        self.was_open_after_step = False

    def step(self, action: str) -> dict[str, Any]:
        self.entered.set()
        assert self.released.wait(10)
        self.was_open_after_step = not self.closed.is_set()
        return super().step(action)


async def test_a_blocking_environment_does_not_hold_up_the_event_loop() -> None:
    env = Slow()
    generator = GymGenerator(ScriptedSampler(["a"]), RENDERER, lambda name, extras: env)
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(generator.generate(request()))
        await asyncio.to_thread(env.entered.wait, 10)
        env.released.set()
    assert playing.result()[0].reward == pytest.approx(0.1)
    assert await asyncio.to_thread(env.closed.wait, 10)


async def cancelled_in_a_step() -> tuple[GymGenerator, Slow]:
    """A generator whose only episode was cancelled, and the episode's environment, which is still in the step."""
    env = Slow()
    generator = GymGenerator(ScriptedSampler(["a"]), RENDERER, lambda name, extras: env)
    playing = asyncio.ensure_future(generator.generate(request()))
    await asyncio.to_thread(env.entered.wait, 10)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    return generator, env


async def test_a_generator_is_closed_after_the_environments_of_cancelled_episodes_each_after_its_call_in_flight() -> (
    None
):
    """A run that ends would otherwise leave what they hold, such as processes."""
    generator, env = await cancelled_in_a_step()
    closing = asyncio.ensure_future(generator.close())
    await asyncio.sleep(0)
    assert not closing.done()
    env.released.set()
    await closing
    assert env.closed.is_set() and env.was_open_after_step


async def test_an_environment_that_hangs_does_not_keep_its_generator_open(caplog: pytest.LogCaptureFixture) -> None:
    generator, env = await cancelled_in_a_step()
    await generator.close(timeout_s=0.01)
    assert "some environments are not closed" in caplog.text
    env.released.set()


async def test_a_cancelled_episode_closes_its_environment_while_sampling() -> None:
    env = Quiz()
    with sampling_blocked() as (sampler, sampling):
        generator = GymGenerator(sampler, RENDERER, lambda name, extras: env)
        playing = asyncio.ensure_future(generator.generate(request()))
        await sampling.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert await asyncio.to_thread(env.closed.wait, 10)


@contextmanager
def sampling_blocked() -> Iterator[tuple[ScriptedSampler, asyncio.Event]]:
    """A sampler that never answers, and the event that it was asked."""
    asked = asyncio.Event()

    class Blocked(ScriptedSampler):
        async def generate_tokens(self, *args: Any, **kwargs: Any) -> Completion:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    yield Blocked([]), asked


async def test_a_sampler_that_forgets_its_prompt_is_refused() -> None:
    class Forgetful(ScriptedSampler):
        async def generate_tokens(self, prompt_token_ids: Sequence[int], *args: Any, **kwargs: Any) -> Completion:
            return await super().generate_tokens(prompt_token_ids[-3:], *args, **kwargs)

    generator = GymGenerator(Forgetful(["a", "b"]), RENDERER, lambda name, extras: Quiz())
    with pytest.raises(GenerationError, match="the prompt of turn 1 must begin with"):
        await generator.generate(request())


def test_derived_seeds_differ_between_samples_and_turns() -> None:
    seeds = {derive_seed(seed, i, turn) for seed in range(20) for i in range(20) for turn in range(20)}
    assert len(seeds) > 7990
    assert all(0 <= seed < 2**31 for seed in seeds)
