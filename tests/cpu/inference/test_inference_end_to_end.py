"""Client, engine, publisher, policy, endpoint and generators together, all real: vLLM on CPU, uvicorn, the openai client.

One engine is booted from an untied policy and one from a tied one. What each says right after its boot is what every later
publish of the same weights is held against.
"""

import asyncio
import itertools
import json
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from skyrl_async.chat import ChatRenderer
from skyrl_async.columns import Logprobs, TokenIds, VersionSpans, begins_with
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import PublishError
from skyrl_async.generators.gym.environment import Environment
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.vllm.engine import VLLMEngine, VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.tasks.relay import RelayEnv
from skyrl_async.tasks.tiny_policy import PolicySizes, make_tiny_model, save_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import (
    ENVIRONMENT_VERSION,
    Completion,
    CompletionDelta,
    FinishReason,
    PauseMode,
    Prompt,
    SamplingParams,
    StructuredOutput,
    Trajectory,
)
from skyrl_async.weight_sync.publisher import WeightPublisher
from skyrl_gym_http import SkyRLGymHTTPGenerator

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "user", "content": "Relay 3. +4"}]
GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
GREEDY_BODY: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
EXTENSIONS = {"return_token_ids": True, "ignore_eos": True}
COMPACT_JSON = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
"""A random policy would spend its whole budget on white space."""
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
    "minItems": 60,
    "maxItems": 60,
}
JSON_SCHEMA = json.dumps({"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]})
MAX_LOGPROB_GAP = 1e-3
NUM_PUBLISHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine under the client, and what it said when it was fresh."""

    policy_dir: Path
    engine: VLLMEngine
    client: InferenceEngineClient
    renderer: ChatRenderer
    fresh: Completion
    fresh_checksum: str

    @property
    def prompt(self) -> TokenIds:
        return self.renderer.render(MESSAGES)

    async def greedy(self) -> Completion:
        return await self.client.generate(prompt_token_ids=self.prompt, sampling=GREEDY)


@pytest.fixture(scope="module")
def skip_repacking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file: while it exists engines do not pack a tied head again, a fault that the weights do not show.

    Set up before engines boot, because their forked cores inherit it.
    """
    switch = tmp_path_factory.mktemp("switch") / "skip"
    with warnings.catch_warnings(action="ignore"):  # vLLM's own deprecations
        from skyrl_async.inference.vllm import weight_transfer
    repack, swap = weight_transfer._pack_again, weight_transfer._Twin.swap

    def swap_but_tied_heads(twin: weight_transfer._Twin) -> list[Any]:
        if switch.exists():
            heads = [layer for layer in twin._twins if type(layer).__name__ == "ParallelLMHead"]
            for head in heads:
                del twin._twins[head]
        return swap(twin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_transfer._Twin, "swap", swap_but_tied_heads)
        patch.setattr(weight_transfer, "_pack_again", lambda model: None if switch.exists() else repack(model))
        yield switch


@contextmanager
def existing(path: Path) -> Iterator[None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["Relay 3. +4", "3+4=7 é ü 漢"] * 4)


def make_policy(directory: Path, tokenizer: PreTrainedTokenizerFast, *, is_tied: bool) -> Path:
    """A tiny policy with weights so large that its greedy text wanders over the whole vocabulary."""
    model = make_tiny_model(PolicySizes(intermediate_size=128, tie_word_embeddings=is_tied), tokenizer, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(10.0)
    directory.mkdir()
    save_policy(model, tokenizer, directory)
    return directory


@asynccontextmanager
async def serving(policy_dir: Path, tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[Serving]:
    config = VLLMEngineConfig(name=policy_dir.name, policy_dir=str(policy_dir), extra_args=COMPACT_JSON)
    engine = await VLLMEngine.start(config)
    renderer = ChatRenderer(tokenizer)
    client = InferenceEngineClient([engine], tokenizer=tokenizer, max_model_len=engine.max_model_len, renderer=renderer)
    try:
        fresh = await client.generate(messages=MESSAGES, sampling=GREEDY)
        yield Serving(
            policy_dir=policy_dir,
            engine=engine,
            client=client,
            renderer=renderer,
            fresh=fresh,
            fresh_checksum=await engine.checksum(),
        )
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast, skip_repacking: Path
) -> AsyncIterator[dict[str, Serving]]:
    """One of an untied policy and one of a tied one, both up before training starts threads that a fork would not survive."""
    root = tmp_path_factory.mktemp("policies")
    untied = make_policy(root / "untied", tokenizer, is_tied=False)
    tied = make_policy(root / "tied", tokenizer, is_tied=True)
    async with serving(untied, tokenizer) as first, serving(tied, tokenizer) as second:
        yield {"untied": first, "tied": second}


@pytest.fixture
def served(request: pytest.FixtureRequest, engines: dict[str, Serving]) -> Serving:
    """One of the engines; every test begins by publishing the policy's first weights."""
    return engines[request.param]


UNTIED = pytest.mark.parametrize("served", ["untied"], indirect=True)
TIED = pytest.mark.parametrize("served", ["tied"], indirect=True)
EITHER = pytest.mark.parametrize("served", ["untied", "tied"], indirect=True)


class Trained:
    """A real policy of the served one's weights, its publisher, and what it held at each version."""

    def __init__(self, served: Serving, directory: Path, mode: PauseMode) -> None:
        self.served = served
        self.policy = InProcessPolicy(TrainingSettings(policy_path=str(served.policy_dir), lr=0.02, max_grad_norm=0.0))
        self.publisher = WeightPublisher(
            client=served.client,
            policy=self.policy,
            directory=directory / "buckets",
            bucket_bytes=64 << 10,
            pause_mode=mode,
            trace=Trace(None, lambda: 0.0),
            probe_prompt_token_ids=served.prompt,
            max_logprob_gap=MAX_LOGPROB_GAP,
        )
        self._directory = directory

    async def step(self) -> None:
        """One optimizer step on some trajectory."""
        fresh = self.served.fresh
        length = 40
        row = Trajectory(
            prompt_token_ids=fresh.prompt_token_ids,
            response_token_ids=fresh.token_ids[:length],
            loss_mask=(1,) * length,
            logprobs=fresh.logprobs[:length],
            versions=(0,) * length,
            reward=1.0,
        )
        await self.policy.forward_backward([row], [-1.0], 0)
        await self.policy.step(length)

    async def publish_step(self, version: int) -> None:
        """Step, keep the weights as a Hugging Face directory, publish."""
        await self.step()
        await self.policy.export_hf(self._directory / f"v{version}")
        await self.publisher.publish(version)

    def reference(self, version: int, token_ids: Sequence[int]) -> torch.Tensor:
        """(T - 1, V) float32 log-probs of each next token, by transformers from the exported directory."""
        model = Qwen3ForCausalLM.from_pretrained(self._directory / f"v{version}", dtype=torch.float32)
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0, :-1]
        return logits.log_softmax(-1)


@asynccontextmanager
async def trained(served: Serving, directory: Path, mode: PauseMode = PauseMode.ABORT) -> AsyncIterator[Trained]:
    """Publishes the first weights as version 0, so that no test sees another's."""
    trained = Trained(served, directory, mode)
    try:
        await trained.policy.export_hf(directory / "v0")
        await trained.publisher.publish(0)
        yield trained
    finally:
        trained.publisher.close()
        await trained.policy.close()


async def stream(served: Serving, publish: Any, num_publishes: int) -> list[CompletionDelta]:
    """Stream a greedy completion, and after every second block publish the next version: it is open meanwhile.

    The engine stands still while that version is made: a slow machine would come too late with it.
    """
    deltas: list[CompletionDelta] = []
    version = 0
    async for delta in served.client.stream_tokens(served.prompt, GREEDY):
        deltas.append(delta)
        if len(deltas) % 2 == 0 and version < num_publishes and delta.finish_reason is None:
            version += 1
            await served.engine.pause(PauseMode.KEEP)
            await publish(version)
    assert version == num_publishes
    return deltas


def joined(deltas: Sequence[CompletionDelta]) -> Completion:
    return Completion(
        prompt_token_ids=(),
        token_ids=np.concatenate([delta.token_ids for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        versions=VersionSpans.joined(delta.versions for delta in deltas),
        text="".join(delta.text for delta in deltas),
        finish_reason=deltas[-1].finish_reason or FinishReason.ABORT,
    )


def assert_close(here: Logprobs, there: Sequence[float] | Logprobs, atol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.tensor(here), torch.tensor(there), atol=atol, rtol=0.0)


@UNTIED
async def test_contract_4_a_greedy_request_aborted_by_weight_publishes_equals_the_uninterrupted_one(
    served: Serving, tmp_path: Path
) -> None:
    async with trained(served, tmp_path) as same, asyncio.TaskGroup() as group:
        requests = [group.create_task(served.greedy()) for _ in range(3)]
        streamed = joined(await stream(served, same.publisher.publish, NUM_PUBLISHES))
    assert len(set(served.fresh.token_ids)) > 20
    assert "�" in served.fresh.text  # decoded in pieces, a text with broken characters comes out otherwise
    for completion in [*(request.result() for request in requests), streamed]:
        assert completion.token_ids.tolist() == served.fresh.token_ids.tolist()
        assert completion.text == served.fresh.text
        assert completion.finish_reason is FinishReason.LENGTH
        assert_close(completion.logprobs, served.fresh.logprobs)
        assert list(completion.versions) == sorted(completion.versions)
        assert set(completion.versions) == set(range(NUM_PUBLISHES + 1))
    assert all(request.result().num_aborts == NUM_PUBLISHES for request in requests)


@UNTIED
async def test_answers_follow_expressions_choices_and_grammars(served: Serving) -> None:
    async def text_of(structured: StructuredOutput) -> str:
        sampling = replace(GREEDY, ignore_eos=False, structured=structured)
        return (await served.client.generate(prompt_token_ids=served.prompt, sampling=sampling)).text

    assert await text_of(StructuredOutput(regex="(ab){3}")) == "ababab"
    assert await text_of(StructuredOutput(choice=("yes", "no"))) in ("yes", "no")
    assert await text_of(StructuredOutput(grammar='root ::= "x" "y"')) == "xy"


@UNTIED
@pytest.mark.parametrize("kind", ["json_schema", "penalties", "bad_words"])
async def test_an_answer_that_cannot_be_continued_passes_whole_through_aborting_publishes(
    served: Serving, tmp_path: Path, kind: str
) -> None:
    if kind == "json_schema":
        sampling = replace(GREEDY, ignore_eos=False, structured=StructuredOutput(json_schema=JSON_SCHEMA))
    elif kind == "bad_words":
        sampling = replace(GREEDY, bad_words=(tuple(served.fresh.token_ids[:2].tolist()),))
    else:
        sampling = replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.3, repetition_penalty=1.2)
    async with trained(served, tmp_path) as same:
        alone = await served.client.generate(prompt_token_ids=served.prompt, sampling=sampling)
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(served.client.generate(prompt_token_ids=served.prompt, sampling=sampling))
                for _ in range(3)
            ]
            deltas = group.create_task(collect(served.client.stream_tokens(served.prompt, sampling)))
            await stream(served, same.publisher.publish, NUM_PUBLISHES)
    [delta] = deltas.result()
    assert (delta.token_ids.tolist(), delta.text) == (alone.token_ids.tolist(), alone.text)
    for completion in (task.result() for task in beside):
        assert (completion.token_ids.tolist(), completion.text) == (alone.token_ids.tolist(), alone.text)
        assert completion.finish_reason is alone.finish_reason
        assert_close(completion.logprobs, alone.logprobs)
        assert list(completion.versions) == sorted(completion.versions)
        # A grammar may have taken until after a publish.
        first = min(completion.versions) if kind == "json_schema" else 0
        assert first < NUM_PUBLISHES and set(completion.versions) == set(range(first, NUM_PUBLISHES + 1))
        assert completion.num_aborts == 0
    if kind == "json_schema":
        numbers = json.loads(alone.text)["numbers"]
        assert len(numbers) == 60 and all(100 <= number <= 999 for number in numbers)
        assert 0.0 in alone.logprobs  # what the grammar forces is certain
    else:
        assert alone.token_ids.tolist() != served.fresh.token_ids.tolist()


async def collect(deltas: AsyncIterator[CompletionDelta]) -> list[CompletionDelta]:
    return [delta async for delta in deltas]


@UNTIED
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_every_token_bears_the_version_it_was_sampled_under_and_the_log_prob_of_a_float32_forward(
    served: Serving, tmp_path: Path, mode: PauseMode
) -> None:
    async with trained(served, tmp_path, mode) as changing:
        async with asyncio.TaskGroup() as group:
            request = group.create_task(served.greedy())
            streamed = joined(await stream(served, changing.publish_step, 3))
        for completion in (request.result(), streamed):
            assert len(completion.token_ids) == GREEDY.max_tokens
            assert list(completion.versions) == sorted(completion.versions)
            assert set(completion.versions) == {0, 1, 2, 3}
            token_ids, versions = torch.tensor(completion.token_ids).long(), list(completion.versions)
            references = torch.stack(
                [
                    changing.reference(version, [*served.prompt, *completion.token_ids])[len(served.prompt) - 1 :]
                    for version in range(4)
                ]
            )
            claimed = references[versions, range(len(token_ids))]
            assert_close(completion.logprobs, claimed.gather(1, token_ids[:, None])[:, 0].tolist())
            assert torch.equal(claimed.argmax(-1), token_ids)
            before = references[[max(0, v - 1) for v in versions], range(len(token_ids))]
            first = [i for i in range(1, len(token_ids)) if versions[i] > versions[i - 1]]
            off = (before.gather(1, token_ids[:, None])[:, 0] - torch.tensor(completion.logprobs)).abs()
            assert len(first) == 3 and off[first].min() > 1e-3


@EITHER
async def test_after_a_publish_an_engine_cannot_be_told_from_a_fresh_one_with_the_same_weights(
    served: Serving, tmp_path: Path
) -> None:
    async with trained(served, tmp_path) as changing:
        await changing.policy.save(tmp_path / "first")
        await changing.publish_step(1)
        changed = await served.greedy()
        assert changed.token_ids.tolist() != served.fresh.token_ids.tolist()
        assert await changing.publisher.verifier.verify_checksums(1) != served.fresh_checksum
        reference = changing.reference(1, [*served.prompt, *changed.token_ids])[len(served.prompt) - 1 :]
        assert reference.argmax(-1).tolist() == changed.token_ids.tolist()
        await changing.policy.load(tmp_path / "first")
        await changing.publisher.publish(2)
        again = await served.greedy()
        assert (again.token_ids.tolist(), again.text) == (served.fresh.token_ids.tolist(), served.fresh.text)
        assert again.logprobs.tolist() == served.fresh.logprobs.tolist()
        assert await changing.publisher.verifier.verify_checksums(2) == served.fresh_checksum


@EITHER
async def test_contract_6_the_log_prob_probe_passes_after_a_publish_and_catches_stale_weights(
    served: Serving, tmp_path: Path
) -> None:
    async with trained(served, tmp_path) as changing:
        await changing.publish_step(1)
        gaps = await changing.publisher.verifier.check(1, is_first=True)
        assert gaps["async/engine_logprob_gap"] < 1e-4
        await changing.step()
        with pytest.raises(PublishError, match=r"by up to .* nats at version 1, more than .*max_engine_logprob_gap"):
            await changing.publisher.verifier.check(1, is_first=False)
        with pytest.raises(PublishError, match=r"stamps tokens with \[1\], expected version 2"):
            await changing.publisher.verifier.check(2, is_first=False)
        await changing.publisher.publish(2)
        assert (await changing.publisher.verifier.check(2, is_first=False))["async/engine_logprob_gap"] < 1e-4


@TIED
async def test_contract_6_the_probe_catches_a_tied_head_left_stale_behind_new_embeddings(
    served: Serving, tmp_path: Path, skip_repacking: Path
) -> None:
    async with trained(served, tmp_path) as changing:
        with existing(skip_repacking):
            await changing.publish_step(1)
        with pytest.raises(PublishError, match="the engines do not hold the weights that are trained"):
            await changing.publisher.verifier.check(1, is_first=False)
        await changing.publisher.publish(2)
        await changing.publisher.verifier.check(2, is_first=False)


@asynccontextmanager
async def endpoint(served: Serving, sampler: Any = None) -> AsyncIterator[str]:
    app = create_app(sampler or served.client, served.renderer, api_keys=["k"])
    async with start_server(app) as (host, port):
        yield f"http://{host}:{port}/v1"


@UNTIED
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_openai_requests_open_while_weights_change_are_held_and_finished(
    served: Serving, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, mode: PauseMode
) -> None:
    async with (
        trained(served, tmp_path, mode) as same,
        endpoint(served) as url,
        AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as openai,
        asyncio.TaskGroup() as group,
    ):
        whole = group.create_task(openai.chat.completions.create(**GREEDY_BODY, extra_body=EXTENSIONS))
        chunks = []
        version = 0
        async for chunk in await openai.chat.completions.create(**GREEDY_BODY, stream=True, extra_body=EXTENSIONS):
            chunks += chunk.choices
            if len(chunks) % 3 == 0 and version < NUM_PUBLISHES:
                version += 1
                await same.publisher.publish(version)
    choice = whole.result().choices[0]
    streamed_ids = [i for c in chunks for i in (c.model_extra or {}).get("token_ids", [])]
    streamed_text = "".join(c.delta.content or "" for c in chunks)
    assert choice.model_extra is not None
    for ids, text in ((choice.model_extra["token_ids"], choice.message.content), (streamed_ids, streamed_text)):
        assert ids == served.fresh.token_ids.tolist()
        assert text == tokenizer.decode(ids, skip_special_tokens=True) == served.fresh.text
    assert choice.finish_reason == chunks[-1].finish_reason == "length"
    versions = [span["version"] for span in choice.model_extra["policy_versions"]]
    assert versions == list(range(len(versions))) and len(versions) > 1, (
        "a busy machine may end it before the last publish"
    )
    assert choice.model_extra["num_aborts"] == (len(versions) - 1 if mode is PauseMode.ABORT else 0)


class ForgivingRelay(RelayEnv):
    """Asks for every turn, whatever was answered: a random policy walks the whole relay."""

    is_fast = True

    def step(self, action: str) -> Any:
        output = super().step(action)
        output["done"] = self.turns == self.max_turns
        if not output["done"]:
            output["observations"] = [{"role": "user", "content": f"+{self.addends[self.turns]}"}]
        return output


def make_relay(name: str, extras: dict[str, Any]) -> Environment:
    environment: Environment = ForgivingRelay(extras=extras)
    return environment


class RecordingSampler:
    """Notes what goes through the client."""

    def __init__(self, client: InferenceEngineClient) -> None:
        self._client = client
        self.completions: list[Completion] = []

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    async def generate_tokens(self, *args: Any, **kwargs: Any) -> Completion:
        completion = await self._client.generate_tokens(*args, **kwargs)
        self.completions.append(completion)
        return completion

    def stream_tokens(self, *args: Any, **kwargs: Any) -> AsyncIterator[CompletionDelta]:
        return self._client.stream_tokens(*args, **kwargs)


async def walk(generator: Generator) -> Trajectory:
    prompt = Prompt(
        uid="relay",
        messages=tuple(MESSAGES),
        env_class="relay",
        extras={"start": 3, "addends": [4, 8, 1, 6], "max_turns": 4},
    )
    (trajectory,) = await generator.generate(
        GroupRequest(prompt=prompt, num_samples=1, sampling=SamplingParams(max_tokens=24, temperature=0.0))
    )
    return trajectory


def assert_is_walked(trajectory: Trajectory, turns: Sequence[Completion]) -> None:
    """The trajectory is its turns end to end, each prompt beginning with everything before it."""
    assert trajectory.num_turns == len(turns) == 4
    assert trajectory.prompt_token_ids.tolist() == turns[0].prompt_token_ids.tolist()
    mask: list[int] = []
    for turn, following in itertools.pairwise(turns):
        partial_output = np.concatenate([turn.prompt_token_ids, turn.token_ids])
        assert begins_with(following.prompt_token_ids, partial_output)
        mask += [1] * len(turn.token_ids) + [0] * (len(following.prompt_token_ids) - len(partial_output))
    mask += [1] * len(turns[-1].token_ids)
    assert trajectory.loss_mask.tolist() == mask
    whole = (*turns[-1].prompt_token_ids, *turns[-1].token_ids)
    assert (*trajectory.prompt_token_ids, *trajectory.response_token_ids) == whole
    sampled = np.concatenate([turn.logprobs for turn in turns])
    assert trajectory.logprobs[trajectory.loss_mask].tolist() == sampled.tolist()
    assert {v for v, m in zip(trajectory.versions, mask, strict=True) if not m} == {ENVIRONMENT_VERSION}


@UNTIED
async def test_a_relay_episode_has_the_same_structure_through_both_generators(served: Serving, tmp_path: Path) -> None:
    in_process, over_http = RecordingSampler(served.client), RecordingSampler(served.client)
    async with trained(served, tmp_path) as same, endpoint(served, over_http) as url:
        here = await walk(GymGenerator(in_process, served.renderer, make_relay))
        http = SkyRLGymHTTPGenerator(url, "k", "policy", make_relay)
        try:
            there = await walk(http)
            async with asyncio.TaskGroup() as group:
                walking = [
                    group.create_task(walk(generator))
                    for generator in (http, GymGenerator(served.client, served.renderer, make_relay))
                ]
                for version in range(1, 4):
                    await same.publisher.publish(version)
        finally:
            await http.close()
    assert_is_walked(here, in_process.completions)
    assert_is_walked(there, over_http.completions[:4])
    for other in (there, *(task.result() for task in walking)):
        assert other.prompt_token_ids.tolist() == here.prompt_token_ids.tolist()
        assert other.response_token_ids.tolist() == here.response_token_ids.tolist()
        assert other.loss_mask.tolist() == here.loss_mask.tolist()
        assert other.reward == here.reward
        assert_close(other.logprobs, here.logprobs)
