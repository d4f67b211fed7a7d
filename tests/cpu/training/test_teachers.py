"""Teachers behind a server: real HTTP, with a model's own log-probs as the scores; and what is refused before a run."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from skyrl_async.columns import repeated
from skyrl_async.composition.algorithms import make_advantages
from skyrl_async.composition.data import Prompts
from skyrl_async.composition.logprobs import teacher_settings, training_settings
from skyrl_async.composition.teachers import check_teachers, teacher_work
from skyrl_async.config.load import from_overrides
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import ConfigError, InferenceError, PolicyError, TrainingError
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.tasks.tiny_policy import PolicySizes, build_tiny_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.served_teacher import ServedTeacher
from skyrl_async.types import Group, LogprobModel, Prompt, RowLogprobs, Trajectory
from tests.cpu.quick_config import config_of
from tests.cpu.tiny_policies import VOCABULARY, trajectories, write_policy, write_tokenizer

TEACHERS = "trainer.algorithm.distillation.teachers"


def decode(token_ids: Sequence[int]) -> str:
    """In the policy's vocabulary."""
    return "".join(f"<{token}>" for token in token_ids)


@dataclass
class Server:
    """Scores prompts as vLLM does."""

    policy: InProcessPolicy
    num_failures: int = 0
    """So many requests are answered by 503 first."""
    num_aborted: int = 0
    """So many are answered without scores first, as vLLM answers what it has not finished when it is told to end."""
    context: int | None = None
    """What it says of its own."""
    texts: dict[int, str] | None = None
    """Of the tokens that are others than the policy's; None: it does not tell them."""
    unknown_path: int = 404
    asked: list[list[int]] = field(default_factory=list)

    async def detokenize(self, request: Request) -> JSONResponse:
        if self.texts is None:
            return JSONResponse({"error": "unknown path"}, self.unknown_path)
        tokens = (await request.json())["tokens"]
        return JSONResponse({"prompt": "".join(self.texts.get(token, decode([token])) for token in tokens)})

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "teacher", "max_model_len": self.context}]})

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("teacher", 1, 0)
        if self.num_aborted:
            self.num_aborted -= 1
            return JSONResponse({"choices": [{"finish_reason": "abort", "prompt_logprobs": None}]})
        if self.num_failures:
            self.num_failures -= 1
            return JSONResponse({"error": "busy"}, 503)
        prompt = body["prompt"]
        self.asked.append(prompt)
        if len(prompt) > 50:
            return JSONResponse({"error": "longer than the model's context"}, 400)
        scores = await self.policy.logprobs(prompt)
        entries = [
            {str(token): {"logprob": score, "decoded_token": decode([token])}}
            for token, score in zip(prompt[1:], scores, strict=True)
        ]
        return JSONResponse({"choices": [{"prompt_logprobs": [None, *entries]}]})

    @asynccontextmanager
    async def teacher(self, timeout_s: float = 30.0) -> AsyncIterator[ServedTeacher]:
        app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
            ]
        )
        async with start_server(app) as (host, port):
            teacher = ServedTeacher("math", f"http://{host}:{port}/v1", api_key="sk", timeout_s=timeout_s)
            try:
                yield teacher
            finally:
                await teacher.close()


@pytest.fixture
def server(tmp_path: Path) -> Server:
    policy = InProcessPolicy(TrainingSettings(policy_path=str(write_policy(tmp_path / "policy"))))
    return Server(policy)


async def test_a_served_teacher_gives_the_log_probs_of_the_model_behind_it_and_is_asked_again(server: Server) -> None:
    rows = trajectories(4, seed=1)
    expected = (await server.policy.logprobs_of(rows, LogprobModel.POLICY)).values
    server.num_failures = 3
    async with server.teacher() as teacher:
        found = await teacher.logprobs_of(rows)
    for one, other in zip(found.values, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    await server.policy.close()


async def test_a_request_that_a_server_aborts_as_it_ends_is_sent_again(server: Server) -> None:
    server.num_aborted = 1
    async with server.teacher() as teacher:
        assert len(await teacher._until_scored([1, 2, 3])) == 3
        server.num_aborted = 1
        with pytest.raises(ConfigError, match="gives no prompt log-probs"):
            await teacher.check([3, 4], decode)
    await server.policy.close()


def teacher_that_answers(answer: Callable[[httpx.Request], Awaitable[httpx.Response]]) -> ServedTeacher:
    """Without sockets, for virtual time."""
    teacher = ServedTeacher("math", "http://teacher/v1", api_key=None, timeout_s=60.0)
    teacher._http = httpx.AsyncClient(base_url="http://teacher/v1", transport=httpx.MockTransport(answer))
    return teacher


def test_the_time_of_a_server_that_is_gone_begins_at_the_first_failure() -> None:
    """In virtual time: it takes longer than ``timeout_s`` to say that it is busy, and scores then."""
    answers = iter([503, 200])

    async def answered(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "teacher"}]})
        await asyncio.sleep(70.0)
        return httpx.Response(next(answers), json={"choices": [{"prompt_logprobs": [None, {}, {}]}]})

    async def scored() -> list[dict[str, object]]:
        return await teacher_that_answers(answered)._until_scored([1, 2, 3])

    assert run_in_virtual_time(scored()) == [{}, {}, {}]


@pytest.mark.parametrize(
    "answer",
    [
        {"status_code": 503},
        {"status_code": 200, "html": "<html>"},
        {"status_code": 200, "json": {"error": "no backend"}},
    ],
)
def test_a_server_that_is_gone_for_good_is_asked_until_its_time_is_over(answer: dict[str, Any]) -> None:
    """Also behind a proxy that says so in its own way. In virtual time; pauses between requests are of 10 s at most."""

    async def gone(request: httpx.Request) -> httpx.Response:
        return httpx.Response(**answer)

    async def main() -> float:
        with pytest.raises(InferenceError, match="teacher math at http://teacher/v1 has not answered for 60 s"):
            await teacher_that_answers(gone).logprobs_of(trajectories(3, seed=1))
        return asyncio.get_running_loop().time()

    assert 60.0 <= run_in_virtual_time(main()) <= 70.0


async def test_a_server_that_is_gone_is_waited_for_and_one_that_refuses_is_not(server: Server) -> None:
    async with server.teacher(timeout_s=0.0) as teacher:
        server.num_failures = 100
        with pytest.raises(InferenceError, match="teacher math at http.* has not answered for 0 s"):
            await teacher.logprobs_of(trajectories(1, seed=1))
        server.num_failures = 0
        with pytest.raises(InferenceError, match="refuses 60 tokens: .*longer than the model's context"):
            await teacher._until_scored([1] * 60)
    await server.policy.close()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("html", "what answers there is another kind of server"),
        ("v2", "http.*/v2/models answers 404"),
        ("private", "http.*/detokenize answers 401, see trainer.algorithm.distillation.api_key"),
        (None, r"nobody answers there \(ConnectError: .+\)"),
    ],
)
async def test_an_address_that_is_no_teachers_is_refused_with_what_was_found_there(path: str | None, told: str) -> None:
    def answer(request: Request) -> Response:
        return PlainTextResponse("<html>", 401 if "private" in request.url.path else 200)

    kinds = ("html", "private")
    app = Starlette(routes=[Route(f"/{kind}/{{path:path}}", answer, methods=["GET", "POST"]) for kind in kinds])
    async with start_server(app) as (host, port):
        url = "http://127.0.0.1:9/v1" if path is None else f"http://{host}:{port}/{path}"
        teacher = ServedTeacher("math", url, api_key=None, timeout_s=1.0)
        with pytest.raises(ConfigError, match=f"distillation.teachers.math={url} must be the address, .*: {told}"):
            await teacher.check([3, 4], decode)
        await teacher.close()


async def test_a_server_of_another_vocabulary_is_refused_with_the_first_token_that_differs(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    ids = range(VOCABULARY)
    async with server.teacher() as teacher:
        for server.texts, differing in (
            ({20: "x", 31: "<32>"}, "20 is 'x' there and '<20>' here"),
            ({0: "x", 31: "y"}, "0 is 'x'"),
            ({VOCABULARY - 1: ""}, f"{VOCABULARY - 1} is ''"),
            ({20: "<20><21", 21: ">"}, "20 is '<20><21' there"),
        ):
            with pytest.raises(ConfigError, match=f"teachers.math=http.* must have the policy's tokens: {differing}"):
                await teacher.check(ids, decode)
        server.texts = {}
        await teacher.check(ids, decode)
        assert not caplog.messages
    await server.policy.close()


async def test_of_a_server_that_does_not_tell_its_tokens_a_few_are_compared_which_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with server.teacher() as teacher:
        await teacher.check(range(VOCABULARY), decode)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert (
            "does not tell its tokens, as vLLM does at /detokenize: 16 of the policy's 48 are compared" in caplog.text
        )
        with pytest.raises(ConfigError, match="must have the policy's tokens: 47 is '<47>' there and 'x' here"):
            await teacher.check(range(VOCABULARY), lambda ids: decode(ids).replace("<47>", "x"))
        server.unknown_path = 500
        with pytest.raises(ConfigError, match="must be the address, .*: http.*/detokenize answers 500"):
            await teacher.check(range(VOCABULARY), decode)
    await server.policy.close()


async def test_a_row_longer_than_a_servers_context_is_refused_before_it_is_sent(server: Server) -> None:
    server.context = 20
    async with server.teacher() as teacher:
        assert len(await teacher._until_scored([1] * 19)) == 19
        with pytest.raises(
            InferenceError,
            match=r"teacher math at http.* has a context of 20 tokens .*has 20: set engine.max_model_len=19",
        ):
            await teacher._until_scored([1] * 20)
    assert [len(prompt) for prompt in server.asked] == [19]
    await server.policy.close()


async def test_a_row_longer_than_a_local_teachers_context_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    (row, longer), asked = trajectories(2, seed=1), list[int]()  # of 8 and of 15 tokens
    directory = write_policy(tmp_path / "short", max_position_embeddings=14)
    config = config_of(f"{TEACHERS}={{t: {directory}}}")

    class Teacher:
        async def logprobs_of(self, rows: Sequence[Trajectory]) -> RowLogprobs:
            asked.extend(one.num_tokens for one in rows)
            return RowLogprobs(values=tuple(one.logprobs for one in rows), version=0)

    work = teacher_work(config, {"t": Teacher()}, prompts({}).train, {})  # type: ignore[dict-item]
    group = Group(uid="p0", admission_index=0, scheduled_version=0, trajectories=(row,))
    silent = replace(longer, loss_mask=np.zeros_like(longer.loss_mask))
    await work(replace(group, trajectories=(row, silent)))
    with pytest.raises(
        TrainingError,
        match=r"teachers.t has a context of 14 tokens .*, and prompt p0 .* 15: set engine.max_model_len=14",
    ):
        await work(replace(group, trajectories=(row, longer)))
    assert asked == [8, 15]  # the second without a sampled token


def prompts(*extras: dict[str, str]) -> Prompts:
    train = tuple(Prompt(uid=f"p{i}", messages=(), env_class="letters", extras=one) for i, one in enumerate(extras))
    return Prompts(train=train, held_out=())


def test_each_prompt_names_its_teacher_and_a_directory_has_the_policys_tokens(tmp_path: Path) -> None:
    sizes = PolicySizes(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32)
    policy, same, other = (
        build_tiny_policy(tmp_path / name, sizes, train_tokenizer([text] * 2), seed=0) or tmp_path / name
        for name, text in (("policy", "Say something."), ("same", "Say something."), ("other", "Cheese, please."))
    )
    check_teachers(config_of(f"{TEACHERS}={{t: {same}}}"), policy, prompts({}, {"teacher": "t"}))
    two = config_of(f"{TEACHERS}={{t: {same}, u: {same}}}", "trainer.algorithm.distillation.teacher_key=judge")
    check_teachers(two, policy, prompts({"judge": "u"}, {"judge": "t"}))
    with pytest.raises(ConfigError, match=r"prompt p1 must name one of t, u in its column 'judge' \(.*\), got None"):
        check_teachers(two, policy, prompts({"judge": "u"}, {}))
    with pytest.raises(
        PolicyError, match=r"teachers.t=.*other must have the policy's tokens: \d+ is '.*' there and '.*' here"
    ):
        check_teachers(config_of(f"{TEACHERS}={{t: {other}}}"), policy, prompts({}))
    with pytest.raises(
        PolicyError, match="teachers.t=host:8000/v1 does not exist; .*, or an address that begins with http://"
    ):
        from_overrides(f"{TEACHERS}={{t: 'host:8000/v1'}}")


def test_the_likeliest_tokens_are_asked_of_a_local_teacher_with_as_many_tokens_as_the_policy(tmp_path: Path) -> None:
    top_k = "trainer.algorithm.distillation.top_k"
    with pytest.raises(ConfigError, match=r"distillation.top_k must be >= 1 or null, got 0"):
        config_of(f"{TEACHERS}={{t: /somewhere}}", f"{top_k}=0")
    with pytest.raises(
        ConfigError,
        match=r"teachers.t must be a local directory with .*top_k=8, got http://host/v1: .*; set top_k=null",
    ):
        config_of(f"{TEACHERS}={{t: 'http://host/v1', u: /somewhere}}", f"{top_k}=8")
    for name in ("policy", "padded"):
        write_tokenizer(write_policy(tmp_path / name, vocab_size=VOCABULARY + 16 * (name == "padded")))
    config = config_of(f"{TEACHERS}={{t: {tmp_path / 'padded'}}}", f"{top_k}=8")
    with pytest.raises(
        PolicyError, match=r"teachers.t=.*padded has 64 tokens and the policy 48: with .*top_k=8 both must have"
    ):
        check_teachers(config, tmp_path / "policy", prompts({}))
    check_teachers(config_of(f"{TEACHERS}={{t: {tmp_path / 'padded'}}}"), tmp_path / "policy", prompts({}))
    vocabulary = json.loads((tmp_path / "padded" / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    (one, first), (other, second) = list(ids.items())[:2]
    ids[one], ids[other] = second, first
    (tmp_path / "padded" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(PolicyError, match=r"padded must have the policy's tokens: \d+ is '.*' there and '.*' here"):
        check_teachers(config, tmp_path / "policy", prompts({}))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_with_top_k_the_divergence_is_in_the_loss_alone_and_rewards_keep_their_advantages(divergence: str) -> None:
    row = replace(trajectories(1, seed=1)[0], teacher_logprobs=np.zeros(4, np.float32))
    for use_rewards, expected in (("false", 0.0), ("true", 0.5)):
        keys = (
            f"{TEACHERS}={{t: /x}}",
            "trainer.algorithm.distillation.top_k=4",
            "trainer.algorithm.distillation.coef=0.3",
            f"trainer.algorithm.distillation.divergence={divergence}",
        )
        config = config_of(*keys, f"trainer.algorithm.distillation.use_rewards={use_rewards}")
        distillation = make_advantages(config.trainer.algorithm).of_step.distillation
        assert distillation is not None
        group = Group(
            uid="p0", admission_index=0, scheduled_version=0, trajectories=(row,), advantages=(repeated(0.5, 4),)
        )
        assert distillation(group).advantages[0].tolist() == [expected] * 4
        settings = training_settings(config, Path("/policy"), num_steps=1)
        assert (settings.teacher_coef, settings.num_top_tokens) == (0.3, 0)
        assert settings.teacher_divergence == divergence
        assert teacher_settings(config, "/x").num_top_tokens == 4


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        (("divergence=reverse_kl",), 3.0),
        (("divergence=forward_kl",), 10.0 - 1),
        (("divergence=forward_kl", "ratio_clip=4"), 4.0 - 1),
        (("divergence=forward_kl", "ratio_clip=null"), math.exp(3.0) - 1),
    ],
)
def test_without_top_k_the_divergence_and_its_bound_are_in_the_advantages_alone(
    keys: tuple[str, ...], share: float
) -> None:
    row = trajectories(1, seed=1)[0]
    row = replace(row, teacher_logprobs=row.logprobs + np.float32(3))
    keys = ("coef=0.5", *keys)
    config = config_of(f"{TEACHERS}={{t: /x}}", *(f"trainer.algorithm.distillation.{key}" for key in keys))
    distillation = make_advantages(config.trainer.algorithm).of_step.distillation
    assert distillation is not None
    group = Group(uid="p0", admission_index=0, scheduled_version=0, trajectories=(row,), advantages=(repeated(0.5, 4),))
    assert distillation(group).advantages[0].tolist() == pytest.approx([0.5 * share] * 4, rel=1e-5)
    assert training_settings(config, Path("/policy"), num_steps=1).teacher_coef == 0.0


@pytest.mark.parametrize("place", ["http://host:80a/v1", "http:///v1", "https://:8000"])
def test_an_address_without_a_host_or_with_another_port_than_a_number_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"teachers.t must be an address such as http://host:8000/v1, got {place}"):
        config_of(f"{TEACHERS}={{t: '{place}'}}")


def test_a_teacher_without_a_name_is_refused_with_how_to_name_it() -> None:
    with pytest.raises(ConfigError, match=r"teachers must be dictionary, got '/x'; write .*teachers=\{name: /x\}"):
        from_overrides(f"{TEACHERS}=/x")


def test_a_server_scores_at_temperature_1_only() -> None:
    with pytest.raises(ConfigError, match="sampling.temperature must be 1 with a server among .*, got 0.7"):
        config_of(f"{TEACHERS}={{t: 'http://host/v1'}}", "generator.sampling.temperature=0.7")
    config_of(f"{TEACHERS}={{t: /somewhere}}", "generator.sampling.temperature=0.7", "generator.n_samples_per_prompt=1")
