"""Groups of agents: real harnesses (functions and programs, with the real openai client) against a small endpoint over HTTP.

What is played here are the seams: sessions, failures, rewards, limits and clean-up. The endpoint is a stand-in.
"""

import asyncio
import itertools
import logging
import math
import os
import select
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, AuthenticationError
from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.environments.answers import FunctionEnv
from skyrl_async.errors import AgentsFailedError, GenerationError
from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.generators.agent.harness import AgentFunction, AgentResult, AgentTask, FunctionHarness
from skyrl_async.generators.agent.reward import AgentEpisode, EnvironmentReward, FunctionReward, RewardFunction
from skyrl_async.generators.agent.sessions import SessionPool
from skyrl_async.generators.agent.settings import make_agent_generator
from skyrl_async.generators.gym.environment import CallThreads
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.types import Prompt, SamplingParams, Trajectory
from tests.cpu.agent_endpoint import CONTROLLER_KEY, StandIn, stand_in
from tests.cpu.scripted_sampler import CONTROLLER_KEY as REAL_CONTROLLER_KEY
from tests.cpu.scripted_sampler import ScriptedSampler, scripted_endpoint
from tests.patience import PATIENCE_S

PROMPT = Prompt(
    uid="p/1",
    messages=({"role": "user", "content": "hello"},),
    env_class="quiz",
    extras={"reward_spec": {"ground_truth": "hello!"}, "depth": 3},
)


class Quiz(BaseTextEnv):
    """One turn; 1 for repeating the right words."""

    is_fast = True

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.right = extras["reward_spec"]["ground_truth"]

    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": float(action == self.right), "done": True}

    def get_metrics(self) -> dict[str, Any]:
        return {"length": 6}


class Relay(BaseTextEnv):
    """Several turns; a tenth for each, until ``stop`` is said. Blocks, so it is called in threads."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": 0.1, "done": action == "stop"}


def make_environment(env_class: str, extras: dict[str, Any]) -> Any:
    return {"quiz": Quiz, "relay": Relay}[env_class](extras)


def echo(messages: list[dict[str, Any]]) -> str:
    """The policy."""
    return f"{messages[-1]['content']}!"


def request(num_samples: int = 2, *, prompt: Prompt = PROMPT, is_evaluation: bool = False) -> GroupRequest:
    return GroupRequest(
        prompt=prompt,
        num_samples=num_samples,
        sampling=SamplingParams(max_tokens=20, temperature=0.7),
        priority=4,
        is_evaluation=is_evaluation,
    )


async def ask(task: AgentTask, *texts: str) -> str:
    """A conversation of one turn per text."""
    messages: list[Any] = list(task.messages)
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for text in ("", *texts):
            messages += [{"role": "user", "content": text}] if text else []
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return str(messages[-1]["content"])


async def talk(task: AgentTask) -> None:
    """A harness: one turn, judged by its text."""
    await ask(task)


def failing(*indices: int) -> AgentFunction:
    """A harness whose samples of these indices fail after their turn."""

    async def run(task: AgentTask) -> None:
        await ask(task)
        if task.sample_index in indices:
            raise RuntimeError(f"tool {task.sample_index} broke")

    return run


@asynccontextmanager
async def agents(
    endpoint: StandIn | SessionPool,
    function: AgentFunction = talk,
    reward: RewardFunction | None = None,
    **settings: Any,
) -> AsyncIterator[AgentGenerator]:
    threads = CallThreads("reward", 4)
    generator = AgentGenerator(
        endpoint if isinstance(endpoint, SessionPool) else SessionPool([endpoint.root], CONTROLLER_KEY),
        FunctionHarness(function),
        FunctionReward(reward, threads) if reward else EnvironmentReward(make_environment, threads, max_turns=8),
        **{"agent_timeout_s": PATIENCE_S, **settings},
    )
    try:
        yield generator
    finally:
        await generator.close()


@asynccontextmanager
async def programs(endpoint: StandIn, command: str, **settings: Any) -> AsyncIterator[AgentGenerator]:
    generator = make_agent_generator(
        GeneratorConfig(**{"command": command, "agent_timeout_s": PATIENCE_S, **settings}),
        urls=[endpoint.root],
        controller_key=CONTROLLER_KEY,
        make_environment=make_environment,
    )
    try:
        yield generator
    finally:
        await generator.close()


def by_sample(rows: tuple[Trajectory, ...]) -> dict[int | None, Trajectory]:
    assert len({row.sample_index for row in rows}) == len(rows)
    return {row.sample_index: row for row in rows}


def everything_is_released(endpoint: StandIn) -> bool:
    return all(session.is_deleted for session in endpoint.sessions.values())


async def test_a_sample_knows_the_engines_that_the_endpoint_called() -> None:
    calls: list[tuple[str, int, float]] = []
    async with stand_in(echo) as endpoint, agents(endpoint) as generator:
        generator.on_call = lambda *call: calls.append(call)
        asked = request()
        await generator.generate(asked)
    assert [asked.progress.work[index].engines for index in (0, 1)] == [("engine-5",)] * 2
    assert calls == [("engine-5", len("hello!"), 0.25)] * 2


PROGRAM = """
import json, os, sys
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()
messages = task["messages"]
for text in ("hello", ""):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": text}]
open("trace.json", "w").write(json.dumps(messages))
"""


@pytest.mark.slow
async def test_a_program_with_the_openai_package_alone_becomes_training_rows(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)
    command = f"{sys.executable} {script}"
    async with stand_in(echo) as endpoint, programs(endpoint, command, working_dir=str(tmp_path / "runs")) as generator:
        rows = by_sample(await generator.generate(request()))
        assert generator.statistics() == {
            "running": 0.0,
            "finished": 2.0,
            "failed": 0.0,
            "timeouts": 0.0,
            "truncated": 0.0,
        }
        assert everything_is_released(endpoint)
        asked = [session.asked for session in endpoint.sessions.values()]
    assert sorted(one["label"] for one in asked) == ["p/1-0", "p/1-1"]
    assert {one["priority"] for one in asked} == {4} and {one["sampling"]["temperature"] for one in asked} == {0.7}
    assert set(rows) == {0, 1}
    for row in rows.values():
        assert (row.reward, row.num_turns, row.num_sampled_tokens) == (1.0, 2, len("hello!" * 2))
        assert row.metrics["length"] == 6.0 and row.metrics["agent/failed"] == 0.0 and row.metrics["timing/agent"] > 0
    kept = sorted((tmp_path / "runs").iterdir())
    assert [directory.name[:6] for directory in kept] == ["p_1-0-", "p_1-1-"]
    assert all((directory / "trace.json").exists() for directory in kept)


async def test_a_failed_sample_is_an_abandoned_member_and_its_group_completes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stand_in(echo) as endpoint, agents(endpoint, failing(1)) as generator:
        with caplog.at_level(logging.WARNING):
            rows = by_sample(await generator.generate(request(3)))
        assert [rows[i].is_abandoned for i in range(3)] == [False, True, False]
        assert [rows[i].num_sampled_tokens for i in range(3)] == [6, 0, 6]
        assert rows[1].metrics["agent/failed"] == 1.0
        assert (generator.statistics()["finished"], generator.statistics()["failed"]) == (2.0, 1.0)
    assert "agent p/1-1 failed: RuntimeError: tool 1 broke" in caplog.text


@pytest.mark.parametrize(("num_samples", "indices"), [(3, (1, 2)), (2, (0, 1)), (1, (0,))])
async def test_a_group_of_which_too_few_finish_fails_with_the_first_reason(
    num_samples: int, indices: tuple[int, ...]
) -> None:
    complaint = rf"{len(indices)} of {num_samples} agents failed on p/1, the first one: RuntimeError: tool {indices[0]}"
    async with stand_in(echo) as endpoint, agents(endpoint, failing(*indices)) as generator:
        asked = request(num_samples)
        with pytest.raises(GenerationError, match=complaint):
            await generator.generate(asked)
        assert everything_is_released(endpoint)
    assert asked.sample_states.failed.keys() == set(indices), "what they did is kept"


async def test_finished_agents_are_kept_when_too_few_finish_and_only_the_others_run_again() -> None:
    runs: list[int] = []

    async def fail_at_first(task: AgentTask) -> None:
        runs.append(task.sample_index)
        await ask(task)
        if task.sample_index and runs.count(task.sample_index) == 1:
            raise RuntimeError(f"tool {task.sample_index} broke")

    async with stand_in(echo) as endpoint, agents(endpoint, fail_at_first) as generator:
        retrier = RolloutRetrier(generator, GeneratorConfig(max_retries=1, rollout_timeout_s=30, retry_backoff_s=0))
        rows = by_sample(await retrier.generate(request(3)))
        assert [rows[i].reward for i in range(3)] == [1.0, 1.0, 1.0] and sorted(runs) == [0, 1, 1, 2, 2]
        assert everything_is_released(endpoint)


async def test_a_second_try_needs_only_as_many_agents_as_the_group_still_lacks() -> None:
    async with stand_in(echo) as endpoint, agents(endpoint, failing(2)) as generator:
        again = replace(request(3), sample_indices=(1, 2))
        rows = by_sample(await generator.generate(again))
        assert {index: row.is_abandoned for index, row in rows.items()} == {1: False, 2: True}
        assert (await generator.generate(replace(again, sample_indices=(2,))))[0].is_abandoned
    async with stand_in(echo) as endpoint, agents(endpoint, failing(1, 2)) as generator:
        with pytest.raises(GenerationError, match="2 of 2 agents failed on p/1"):
            await generator.generate(again)


async def test_a_single_sample_is_enough_where_one_is_asked() -> None:
    async with stand_in(echo) as endpoint, agents(endpoint) as generator:
        (row,) = await generator.generate(request(1))
        assert (row.reward, row.sample_index) == (1.0, 0)


@pytest.mark.slow
async def test_an_agent_that_takes_too_long_is_abandoned_with_what_it_had_sampled() -> None:
    async def stall(task: AgentTask) -> None:
        await ask(task)
        if task.sample_index == 1:
            await asyncio.Event().wait()

    async with stand_in(echo) as endpoint, agents(endpoint, stall, agent_timeout_s=1.5) as generator:
        rows = by_sample(await generator.generate(request(3)))
        assert rows[1].is_abandoned and rows[1].metrics["agent/timeouts"] == 1.0
        assert generator.statistics()["timeouts"] == 1.0


async def test_a_timeout_of_the_harness_itself_is_not_the_deadline_s() -> None:
    async def give_up(task: AgentTask) -> None:
        await ask(task)
        if task.sample_index == 0:
            raise TimeoutError("the tool took too long")

    async with stand_in(echo) as endpoint, agents(endpoint, give_up) as generator:
        rows = by_sample(await generator.generate(request(3)))
        assert rows[0].is_abandoned and rows[0].metrics["agent/timeouts"] == 0.0


async def test_a_harness_that_never_asks_the_model_has_failed_and_leaves_a_row_without_tokens() -> None:
    async def ask_unless_first(task: AgentTask) -> float:
        if task.sample_index:
            await ask(task)
        return 1.0

    async with stand_in(echo) as endpoint, agents(endpoint, ask_unless_first) as generator:
        asked = request(3)
        rows = by_sample(await generator.generate(asked))
        assert [(rows[i].is_abandoned, rows[i].num_tokens > 0) for i in range(3)] == [
            (True, False),
            *[(False, True)] * 2,
        ]
        assert rows[0].metrics["agent/failed"] == 1.0 and "without a turn" in rows[0].logs["failure"]
        assert asked.sample_states.failed[0] == (rows[0],)
        with pytest.raises(
            GenerationError, match=r"no request came with its key \(does it use .*: it ended without a turn"
        ):
            await generator.generate(request(2))


async def test_an_agent_whose_requests_are_all_refused_fails_with_their_number_and_its_own_words() -> None:
    async with stand_in(echo, max_turns=0) as endpoint, agents(endpoint) as generator:
        with pytest.raises(
            GenerationError, match=r"none of its requests became a turn \(1 came with its key\): Authent"
        ):
            await generator.generate(request(2))


async def find_no_key(task: AgentTask) -> None:
    raise KeyError("MY_KEY")


async def return_a_list(task: AgentTask) -> Any:
    await ask(task)
    return [1]


@pytest.mark.parametrize("is_evaluation", [False, True])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (find_no_key, "no request came with its key.*: KeyError: 'MY_KEY'"),
        (return_a_list, r"must return .*, got \[1\]"),
    ],
)
async def test_a_run_ends_at_once_with_the_reason_why_none_of_its_first_samples_worked(
    function: AgentFunction, expected: str, is_evaluation: bool
) -> None:
    reason = f"none of the first 8 samples worked; the last of them .*{expected}"
    async with stand_in(echo) as endpoint, agents(endpoint, function) as generator:
        retrier = RolloutRetrier(generator, GeneratorConfig(max_retries=99, rollout_timeout_s=30, retry_backoff_s=0))
        with pytest.raises(AgentsFailedError, match=reason):
            await retrier.generate(request(8, is_evaluation=is_evaluation))
        assert len(endpoint.sessions) == 8 and everything_is_released(endpoint)


async def test_a_run_ends_at_once_with_the_place_where_its_reward_always_raises() -> None:
    def reward(prompt: Prompt, episode: AgentEpisode) -> float:
        return float(prompt.extras["no_such_column"])

    reason = r"generator.reward raised KeyError: 'no_such_column' \(.*test_agent_generator.py:\d+\) for prompt 'p/1'"
    async with stand_in(echo) as endpoint, agents(endpoint, reward=reward) as generator:
        with pytest.raises(GenerationError, match=reason):
            await generator.generate(request())
        with pytest.raises(AgentsFailedError, match=f"none of the first 8 samples worked.*{reason}"):
            await generator.generate(request(6))


async def test_a_reward_that_awaits_what_it_cancelled_fails_by_name() -> None:
    async def reward(prompt: Prompt, episode: AgentEpisode) -> float:
        own = asyncio.ensure_future(asyncio.Event().wait())
        own.cancel()
        return await own

    async with stand_in(echo) as endpoint, agents(endpoint, reward=reward) as generator:
        with pytest.raises(GenerationError, match="generator.reward was cancelled from inside.* for prompt 'p/1'"):
            await generator.generate(request())


async def test_a_reason_is_shown_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    async def break_down(task: AgentTask) -> None:
        await ask(task)
        raise RuntimeError("the tool broke")

    async with stand_in(echo) as endpoint, agents(endpoint, break_down) as generator:
        with caplog.at_level(logging.WARNING):
            await generator.generate(request(12, is_evaluation=True))
    shown = [record.message.partition(" failed")[2] for record in caplog.records]
    assert shown == [": RuntimeError: the tool broke", ", like 9 before it: RuntimeError: the tool broke"]


async def test_failed_samples_of_an_evaluation_earn_nothing_and_count() -> None:
    async def run(task: AgentTask) -> None:
        if task.sample_index:
            await ask(task)
        if task.sample_index < 2:
            raise RuntimeError("broken")

    async with stand_in(echo) as endpoint, agents(endpoint, run) as generator:
        rows = by_sample(await generator.generate(request(3, is_evaluation=True)))
        assert [rows[i].reward for i in range(3)] == [0.0, 0.0, 1.0]
        assert not any(row.is_abandoned for row in rows.values())
        assert [rows[i].num_sampled_tokens for i in range(3)] == [0, 6, 6]


async def test_an_agent_stopped_by_a_cap_is_rewarded_for_what_it_did() -> None:
    async def go_on_and_on(task: AgentTask) -> None:
        with pytest.raises(AuthenticationError) as refused:
            await ask(task, "a", "b", "hello", "c")
        raise refused.value

    seen: list[AgentEpisode] = []

    def reward(prompt: Prompt, episode: AgentEpisode) -> float:
        seen.append(episode)
        return 0.25

    async with stand_in(echo, max_turns=4) as endpoint, agents(endpoint, go_on_and_on, reward) as generator:
        rows = by_sample(await generator.generate(request(2)))
        assert generator.statistics()["truncated"] == 2.0
    assert all((row.reward, row.is_truncated, row.is_abandoned) == (0.25, True, False) for row in rows.values())
    assert seen[0].is_truncated and "AuthenticationError" in str(seen[0].failure)
    assert (seen[0].last_text, seen[0].num_turns, len(seen[0].messages)) == ("hello!", 4, 8)


async def test_an_agent_that_fails_of_a_cut_answer_is_rewarded_as_truncated_and_one_that_went_on_is_not() -> None:
    """As the OpenAI Agents SDK fails of an incomplete response."""

    async def fail_after(task: AgentTask) -> None:
        await ask(task, *(["hi"] if task.sample_index == 1 else []))
        raise RuntimeError("response.incomplete")

    def say(messages: list[dict[str, Any]]) -> str:
        return "ok" if messages[-1]["content"] == "hi" else "a long answer"

    async with stand_in(say, max_chars=6) as endpoint, agents(endpoint, fail_after, lambda *_: 0.25) as generator:
        rows = by_sample(await generator.generate(request(3)))
        assert (generator.statistics()["failed"], generator.statistics()["truncated"]) == (1.0, 2.0)
    assert [rows[i].is_truncated for i in range(3)] == [True, False, True]
    assert [rows[i].is_abandoned for i in range(3)] == [False, True, False]
    assert [rows[i].reward for i in range(3)] == [0.25, 0.0, 0.25]
    assert [rows[i].metrics["agent/cut_short"] for i in range(3)] == [1.0, 0.0, 1.0]
    assert [rows[i].metrics["agent/failed"] for i in range(3)] == [0.0, 1.0, 0.0]
    assert {row.metrics["agent/side_tokens"] for row in rows.values()} == {14.0}


async def test_a_reward_function_sees_the_episode_and_its_files_before_the_session_is_finished() -> None:
    async with stand_in(echo) as endpoint:

        async def run(task: AgentTask) -> str:
            assert task.extras == {"depth": 3}
            (task.working_dir / "found").write_text(await ask(task))
            return "the answer"

        async def reward(prompt: Prompt, episode: AgentEpisode) -> float:
            assert all(session.state == "open" for session in endpoint.sessions.values())
            assert prompt.extras["reward_spec"]["ground_truth"] == (episode.working_dir / "found").read_text()
            assert (episode.output, episode.answer, episode.last_text) == ("the answer", "the answer", "hello!")
            return 0.5

        async with agents(endpoint, run, reward) as generator:
            assert [row.reward for row in await generator.generate(request(1))] == [0.5]


async def test_a_function_may_reward_itself() -> None:
    async def run(task: AgentTask) -> AgentResult:
        await ask(task)
        return AgentResult(reward=0.75, metrics={"tools": 2.0})

    async with stand_in(echo) as endpoint, agents(endpoint, run) as generator:
        (row,) = await generator.generate(request(1))
        assert row.reward == 0.75 and row.metrics["tools"] == 2.0


@pytest.mark.parametrize("is_own", [False, True], ids=["generator.reward", "the harness itself"])
@pytest.mark.parametrize(
    "rewards", [[0.5, -0.25], (0.5, -0.25), np.array([0.5, -0.25])], ids=["list", "tuple", "array"]
)
async def test_a_reward_may_be_one_for_each_of_the_first_turns(is_own: bool, rewards: Any) -> None:
    async def run(task: AgentTask) -> AgentResult:
        await ask(task, "go on", "go on")
        return AgentResult(reward=rewards if is_own else None)

    async with stand_in(echo) as endpoint, agents(endpoint, run, lambda *_: rewards) as generator:
        await generator.generate(request(1))
        (session,) = endpoint.sessions.values()
    assert session.finish["reward"] == 0.25
    assert session.finish["rewards"] == [{"turn": 0, "value": 0.5}, {"turn": 1, "value": -0.25}]


async def test_a_reward_may_be_one_for_each_token_of_a_turn() -> None:
    def reward(_: Prompt, episode: AgentEpisode) -> list[Any]:
        first, second = episode.num_turn_tokens
        return [torch.full((first,), 0.25), 1.0 if second else 0.0]

    async def run(task: AgentTask) -> None:
        await ask(task, "go on")

    async with stand_in(echo) as endpoint, agents(endpoint, run, reward) as generator:
        await generator.generate(request(1))
        (session,) = endpoint.sessions.values()
    num = len(session.replies[0])
    assert session.finish["rewards"] == [{"turn": 0, "value": [0.25] * num}, {"turn": 1, "value": 1.0}]
    assert session.finish["reward"] == 0.25 * num + 1.0


@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        (math.nan, "generator.reward must return a finite number as reward, got nan"),
        ("x", "as reward, got 'x'"),
        ([0.5, 0.5], r"generator.reward must return at most one reward per turn \(1\), got 2: \[0.5, 0.5\]"),
        (
            [],
            r"generator.reward must return a number, or a reward for at least one of its turns \(1\), got \[\]; return 0 for",
        ),
        ([math.inf], r"generator.reward\[0\] must return a finite number as reward, got inf"),
        (
            [torch.ones(2, requires_grad=True)],
            r"generator.reward\[0\] must return finite numbers \(float32\) as rewards of tokens, got tensor",
        ),
        ([["x"]], r"generator.reward\[0\] must return finite numbers .* of tokens, got \['x'\]"),
        ([[0.0] * 9 + [1e39]], r"generator.reward\[0\] must return finite .* of tokens, got 1e\+39 for token 9"),
        (10**400, "generator.reward must return a finite number as reward, got 1000"),
        ([[0.5]], r"generator.reward\[0\] must have one number per sampled token \(\d+\), got 1"),
    ],
)
async def test_a_reward_that_is_no_number_fails_the_group(reward: Any, complaint: str) -> None:
    async with stand_in(echo) as endpoint, agents(endpoint, reward=lambda prompt, episode: reward) as generator:
        with pytest.raises(GenerationError, match=complaint):
            await generator.generate(request())
        assert everything_is_released(endpoint)


async def test_a_harness_that_rewards_itself_with_no_number_fails_the_group() -> None:
    async def run(task: AgentTask) -> float:
        await ask(task)
        return math.inf

    async with stand_in(echo) as endpoint, agents(endpoint, run) as generator:
        with pytest.raises(
            GenerationError, match="generator.entrypoint must return a finite number as reward, got inf"
        ):
            await generator.generate(request())


async def test_an_environment_that_fails_fails_the_group_by_name() -> None:
    prompt = Prompt(uid="q", messages=PROMPT.messages, env_class="quiz", extras={"reward_spec": {}})
    asked = request(prompt=prompt)
    async with stand_in(echo) as endpoint, agents(endpoint) as generator:
        with pytest.raises(KeyError, match="ground_truth"):
            await generator.generate(asked)
        assert everything_is_released(endpoint)
    lost = {
        index: [(row.num_sampled_tokens, row.logs) for row in rows]
        for index, rows in asked.sample_states.failed.items()
    }
    assert lost == {i: [(0, {"failure": "KeyError: 'ground_truth'"})] for i in (0, 1)}, "what the agents did is kept"


def said(*texts: str) -> list[dict[str, Any]]:
    return [m for text in texts for m in ({"role": "assistant", "content": text}, {"role": "user", "content": "?"})]


CALL = {"role": "assistant", "content": "let me look", "tool_calls": [{"id": "1"}]}
EXAMPLE = {"role": "assistant", "content": "for example"}


def episode_of(*messages: dict[str, Any], num_turns: int | None = None) -> AgentEpisode:
    """An episode of a conversation in which all of the assistant's messages but the example are sampled."""
    conversation, turns = [*PROMPT.messages, *messages], itertools.count()
    is_sampled = [message["role"] == "assistant" and message is not EXAMPLE for message in conversation]
    return AgentEpisode(
        messages=tuple(conversation),
        message_turns=tuple(next(turns) if one else None for one in is_sampled),
        last_text=None,
        output=None,
        working_dir=Path(),
        num_turns=sum(is_sampled) if num_turns is None else num_turns,
        is_truncated=False,
    )


@pytest.mark.parametrize(
    ("messages", "max_turns", "reward"),
    [
        (said("a", "b"), None, 0.2),
        (said("a", "stop", "c"), None, 0.2),
        ([CALL, *said("a")], None, 0.1),
        ([EXAMPLE, *said("a", "b")], None, 0.2),
        (said("a", "b", "c", "d"), 3, 0.3),
        (said(*"abcdefghijkl"), 100, 0.8),
        ([{"role": "assistant", "content": [{"type": "text", "text": "stop"}]}, *said("b")], None, 0.1),
        ([], None, 0.0),
    ],
)
async def test_an_environment_of_several_turns_is_told_each_sampled_text_until_it_is_done(
    messages: list[dict[str, Any]], max_turns: int | None, reward: float
) -> None:
    extras = {} if max_turns is None else {"max_turns": max_turns}
    prompt = Prompt(uid="r", messages=PROMPT.messages, env_class="relay", extras=extras)
    source = EnvironmentReward(make_environment, CallThreads("reward", 1), max_turns=8)
    earned = await source.reward_of(prompt, episode_of(*messages))
    assert earned.reward == pytest.approx(reward)


@pytest.mark.parametrize("num_turns", [3, 4], ids=["all turns", "with turns elsewhere"])
async def test_what_an_environment_gives_for_a_text_is_the_reward_of_the_turn_that_sampled_it(num_turns: int) -> None:
    source = EnvironmentReward(make_environment, CallThreads("reward", 1), max_turns=8)
    prompt = Prompt(uid="r", messages=PROMPT.messages, env_class="relay", extras={})
    earned = await source.reward_of(prompt, episode_of(EXAMPLE, CALL, *said("a", "b"), num_turns=num_turns))
    assert earned.turn_rewards == pytest.approx((0.0, 0.1, 0.1)) and earned.reward == pytest.approx(0.2)


async def test_an_environments_reward_that_is_not_finite_is_named_with_its_turn_and_prompt() -> None:
    class Late(Relay):
        def step(self, action: str) -> dict[str, Any]:
            return super().step(action) | {"reward": math.nan if action == "b" else 0.1}

    source = EnvironmentReward(lambda _, extras: Late(extras), CallThreads("reward", 1), max_turns=8)
    complaint = "Late.step for turn 1 must return a finite number as reward, got nan"
    prompt = Prompt(uid="r", messages=PROMPT.messages, env_class="relay", extras={})
    with pytest.raises(GenerationError, match=complaint) as caught:
        await source.reward_of(prompt, episode_of(*said("a", "b")))
    assert caught.value.__notes__ == ["in environment 'relay', which rewards prompt 'r'"]


async def test_an_environment_that_rewards_other_tokens_than_were_sampled_fails_the_group() -> None:
    episode = AgentEpisode(
        messages=(),
        last_text="hello!",
        output=None,
        working_dir=Path(),
        num_turns=1,
        num_turn_tokens=(3,),
        is_truncated=False,
    )
    found = [0.5, 0.25, 0.0]
    source = EnvironmentReward(
        lambda name, extras: FunctionEnv(lambda answer, columns: found, extras), CallThreads("reward", 1), max_turns=8
    )
    (of_turn,) = (await source.reward_of(PROMPT, episode)).turn_rewards
    assert np.array_equal(of_turn, found)
    found.pop()
    with pytest.raises(GenerationError, match=r"FunctionEnv.step for turn 0 must have .* token \(3\), got 2"):
        await source.reward_of(PROMPT, episode)
    found.append(math.nan)
    with pytest.raises(GenerationError, match=r"task.reward must return finite .* got nan for token 2"):
        await source.reward_of(PROMPT, episode)


async def test_an_environment_of_one_turn_is_told_the_answer() -> None:
    async def answer(task: AgentTask) -> str:
        await ask(task, "something else")
        return "hello!"

    async with stand_in(echo) as endpoint:
        async with agents(endpoint, answer) as generator:
            assert [row.reward for row in await generator.generate(request(1))] == [1.0]
        async with agents(endpoint, talk) as generator:
            assert [row.reward for row in await generator.generate(request(1))] == [1.0]


async def test_agents_of_all_groups_share_one_limit() -> None:
    running, most = 0, 0
    full = asyncio.Event()

    async def count(task: AgentTask) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await ask(task)
        running -= 1
        return float(task.sample_index)

    async with stand_in(echo) as endpoint, agents(endpoint, count, max_concurrent_agents=3) as generator:
        async with asyncio.TaskGroup() as groups:
            tasks = [groups.create_task(generator.generate(request(2)), name=f"group-{i}") for i in range(4)]
        assert most == 3
        assert generator.statistics()["finished"] == 8.0
    assert [sorted(row.reward for row in task.result()) for task in tasks] == [[0.0, 1.0]] * 4


async def test_temporary_directories_are_gone_afterwards_whatever_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directories = []

    async def write(task: AgentTask) -> None:
        directories.append(task.working_dir)
        (task.working_dir / "deep").mkdir()
        (task.working_dir / "deep" / "file").touch()
        await failing(1)(task)

    async with stand_in(echo) as endpoint, agents(endpoint, write) as generator:
        await generator.generate(request(3))
    assert len(set(directories)) == 3 and {directory.parent.parent for directory in directories} == {tmp_path}
    assert os.listdir(tmp_path) == []


async def test_an_endpoint_that_vanishes_fails_the_group_and_not_the_agent() -> None:
    async with stand_in(echo) as endpoint, agents(endpoint) as generator:
        endpoint.app.router.routes = [r for r in endpoint.app.router.routes if "sessions/{name}" not in str(r)]
        with pytest.raises(GenerationError, match=r"GET .*/sessions/s0 was answered 404"):
            await generator.generate(request(1))
        assert generator.statistics()["failed"] == 0.0


async def test_a_session_that_is_lost_fails_its_sample_only() -> None:
    async with stand_in(echo) as endpoint:

        async def lose(task: AgentTask) -> None:
            await ask(task)
            if task.sample_index == 0:
                endpoint.sessions[task.api_key.removeprefix("sk-")].is_deleted = True

        async with agents(endpoint, lose) as generator:
            rows = by_sample(await generator.generate(request(3)))
            assert [rows[i].is_abandoned for i in range(3)] == [True, False, False]
            assert rows[0].metrics["agent/failed"] == 1.0 and "its session was lost" in rows[0].logs["failure"]
            assert generator.statistics()["failed"] == 1.0


async def test_an_agent_that_fails_in_an_outage_is_played_again_and_not_masked() -> None:
    deadlines, failed = Deadlines(), list[int]()

    def say(messages: list[dict[str, Any]]) -> str:
        if not failed:
            deadlines.outages.begin("front end 0")
        deadlines.outages.end("front end 0")
        return echo(messages)

    async def run(task: AgentTask) -> None:
        await ask(task)
        if not failed:
            failed.append(task.sample_index)
            raise ConnectionResetError("the session is gone")

    async with stand_in(say) as endpoint, agents(endpoint, run, deadlines=deadlines) as generator:
        retrier = RolloutRetrier(
            generator, GeneratorConfig(max_retries=0, rollout_timeout_s=PATIENCE_S, retry_backoff_s=0), deadlines
        )
        rows = by_sample(await retrier.generate(request(3)))
    assert [rows[i].is_abandoned for i in range(3)] == [False] * 3
    assert len(endpoint.sessions) == 4 and retrier.num_retries == 0


async def test_a_session_that_expired_while_its_agent_was_busy_fails_the_sample() -> None:
    async with stand_in(echo) as endpoint:

        async def be_busy(task: AgentTask) -> None:
            await ask(task)
            if task.sample_index == 0:
                endpoint.sessions[task.api_key.removeprefix("sk-")].state = "expired"

        async with agents(endpoint, be_busy) as generator:
            rows = by_sample(await generator.generate(request(3)))
            assert [rows[i].is_abandoned for i in range(3)] == [True, False, False]


@pytest.mark.slow
async def test_the_real_endpoint_captures_an_agents_turns_as_one_exact_row() -> None:
    async def run(task: AgentTask) -> float:
        return float(await ask(task, "again") == "second")

    sampler = ScriptedSampler(scripts=[["fi", "rst"], ["second"]])
    async with scripted_endpoint(sampler) as url, agents(SessionPool([url], REAL_CONTROLLER_KEY), run) as generator:
        (row,) = await generator.generate(request(1))
    assert [sampling.temperature for sampling in sampler.sampled] == [0.7, 0.7]
    assert (row.reward, row.num_turns, row.sample_index, row.is_truncated) == (1.0, 2, 0, False)
    assert tuple(row.prompt_token_ids) == sampler.prompts[0]
    assert (*row.prompt_token_ids, *row.response_token_ids) == (*sampler.prompts[1], *sampler.completions[1])
    trained = [i for i, is_trained in zip(row.response_token_ids, row.loss_mask, strict=True) if is_trained]
    assert tuple(trained) == (*sampler.completions[0], *sampler.completions[1])
    assert set(row.versions) == {7, 8, -1}


BLOCKED = 'echo $$ > "$AGENT_READY"; read line < "$AGENT_NEVER"'
BLOCKED_FAMILY = f"setsid sh -c '{BLOCKED}' & {BLOCKED}"


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe into which blocked programs write their ids."""
    for name in ("ready", "never"):
        os.mkfifo(tmp_path / name)
        monkeypatch.setenv(f"AGENT_{name.upper()}", str(tmp_path / name))
    return tmp_path / "ready"


async def processes_of(ready: Path, count: int) -> list[int]:
    """Descriptors that are readable once the processes are dead."""
    with os.fdopen(os.open(ready, os.O_RDWR)) as pipe:
        return [os.pidfd_open(int(await asyncio.to_thread(pipe.readline))) for _ in range(count)]


def are_dead(processes: list[int]) -> bool:
    dead = [bool(select.select([process], [], [], 5)[0]) for process in processes]
    for process in processes:
        os.close(process)
    return all(dead)


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave the group are found on Linux only")
async def test_cancelling_a_group_kills_its_programs_and_deletes_its_sessions(ready: Path) -> None:
    async with stand_in(echo) as endpoint, programs(endpoint, BLOCKED_FAMILY) as generator:
        async with asyncio.TaskGroup() as tasks:
            group = tasks.create_task(generator.generate(request(3)), name="group")
            processes = await processes_of(ready, 6)
            assert generator.statistics()["running"] == 3.0
            group.cancel()
        assert group.cancelled() and are_dead(processes)
        assert len(endpoint.sessions) == 3 and everything_is_released(endpoint)
        assert generator.statistics()["running"] == 0.0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave the group are found on Linux only")
async def test_a_program_that_takes_too_long_is_killed_with_all_it_started(ready: Path) -> None:
    async with stand_in(echo) as endpoint, programs(endpoint, BLOCKED_FAMILY, agent_timeout_s=2.0) as generator:
        async with asyncio.TaskGroup() as tasks:
            group = tasks.create_task(fails(generator), name="group")
            processes = await processes_of(ready, 2)
        assert "it took longer than generator.agent_timeout_s=2" in group.result()
        assert are_dead(processes) and everything_is_released(endpoint)


async def fails(generator: AgentGenerator) -> str:
    with pytest.raises(GenerationError) as failure:
        await generator.generate(request(1))
    return str(failure.value)


async def test_an_agent_waiting_for_the_endpoint_is_cancelled_at_once() -> None:
    async with stand_in(echo) as endpoint, agents(endpoint) as generator:
        endpoint.held = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            group = tasks.create_task(generator.generate(request(2)), name="group")
            await endpoint.asked.wait()
            group.cancel()
        assert group.cancelled() and everything_is_released(endpoint)
        endpoint.held.set()
