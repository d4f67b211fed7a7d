"""How values of the configuration reach the parts."""

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from skyrl_async.composition.data import (
    PolicyFiles,
    Prompts,
    check_context,
    check_critic_warmup,
    check_overlong_penalty,
    check_positions,
    load_renderer,
    num_planned_steps,
)
from skyrl_async.composition.logprobs import (
    LogprobParts,
    check_logprobs,
    critic_settings,
    stage_works,
    training_settings,
)
from skyrl_async.composition.processes import Processes
from skyrl_async.composition.run import _shared_cores
from skyrl_async.composition.run_directory import write_private
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.run import Config, PlacementConfig
from skyrl_async.config.schema.training import TrainingConfig
from skyrl_async.errors import ConfigError, PolicyError
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.sharded import lr_factor
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Group, Prompt, Trajectory
from tests.cpu.config.test_config import policy_directory
from tests.cpu.quick_config import config_of
from tests.cpu.tiny_policies import assert_close, trajectories, weights, write_policy, write_tokenizer

GAE = "trainer.algorithm.advantage_estimator=gae"


def test_engines_and_trainer_share_the_cores_that_the_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert _shared_cores(config_of("engine.device=cpu")) == 2
    elsewhere = ["engine.device=cuda", "training.device=cuda", "placement.ray_address=auto"]
    assert _shared_cores(config_of(*elsewhere)) == 0


def test_engines_with_room_for_more_than_two_mini_batches_get_more_up_to_the_bound() -> None:
    def in_flight(*overrides: str) -> int:
        config = config_of(*overrides)
        return config.trainer.max_concurrent_generation_groups(config.num_group_places)

    assert in_flight() == 16, "one engine runs 8 groups at once"
    assert in_flight("engine.num_engines=4", "trainer.max_staleness_steps=4") == 32
    assert in_flight("engine.num_engines=4", "trainer.max_staleness_steps=1") == 16
    assert in_flight("engine.num_engines=4", "trainer.num_parallel_generation_workers=9") == 9
    assert in_flight("engine.num_engines=1", "engine.max_num_seqs=65", "generator.n_samples_per_prompt=3") == 22


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1024}, 1024),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}, None),
    ],
)
def test_a_context_in_which_rows_would_change_each_others_positions_is_refused(
    tmp_path: Path, rope: dict[str, object], most: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **rope}))
    for length in (1024, 2048, 8192):
        is_refused = most is not None and length > most
        refused = pytest.raises(ConfigError, match=f"max_model_len must be at most {most} .* got {length}")
        with refused if is_refused else contextlib.nullcontext():
            check_positions(config_of(f"engine.max_model_len={length}"), tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("declared", "overrides", "most"),
    [
        ({"max_position_embeddings": 4096}, (), 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, (), 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": YARN}, (), 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, (), 8192),
        (
            {"max_position_embeddings": 4096, "rope_parameters": {"full": {"rope_type": "linear", "factor": 2}}},
            (),
            8192,
        ),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": None}}, (), 4096),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, (), 8192),
        ({"n_layer": 2}, (), None),
        ({"max_position_embeddings": 4096}, ("engine.backend=deterministic",), None),
        ({"max_position_embeddings": 4096}, ("engine.extra_args.hf_overrides.max_position_embeddings=9999",), None),
    ],
)
def test_a_context_that_vllm_would_refuse_is_refused_before_anything_boots(
    tmp_path: Path, declared: dict[str, object], overrides: tuple[str, ...], most: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(declared))
    for length in (4096, 4097, 8192, 8193):
        is_refused = most is not None and length > most
        refused = pytest.raises(ConfigError, match=f"max_model_len must be at most {most}, .* got {length}: vLLM")
        with refused if is_refused else contextlib.nullcontext():
            check_context(config_of(f"engine.max_model_len={length}", *overrides), tmp_path)
    check_context(config_of("engine.max_model_len=null", *overrides), tmp_path)


def test_a_context_that_vllm_is_told_to_accept_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_context(config_of("engine.max_model_len=4097"), tmp_path)


@pytest.mark.parametrize(("max_tokens", "is_refused"), [(4195, False), (4196, True)])
def test_a_penalty_that_no_answer_within_the_context_is_long_enough_for_is_refused(
    tmp_path: Path, max_tokens: int, is_refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    overrides = ("engine.max_model_len=null", f"generator.sampling.max_tokens={max_tokens}", "generator.max_turns=1")
    check_overlong_penalty(config_of(*overrides), tmp_path)
    refused = pytest.raises(ConfigError, match=r"overlong_buffer_len=101 .* more than 4095 tokens, .* context of 4096")
    with refused if is_refused else contextlib.nullcontext():
        check_overlong_penalty(config_of(*overrides, "trainer.algorithm.overlong_buffer_len=101"), tmp_path)


def prompts(num: int) -> Prompts:
    message = {"role": "user", "content": "?"}
    train = tuple(Prompt(uid=f"p{i}", messages=(message,), env_class="x") for i in range(num))
    return Prompts(train=train, held_out=())


@pytest.mark.parametrize(
    ("num_steps", "num_epochs", "expected"), [("null", 3, 8), ("5", 3, 5), ("50", 3, 8), ("5", 1000, 5)]
)
def test_a_run_has_the_steps_asked_for_or_those_its_epochs_hold(num_steps: str, num_epochs: int, expected: int) -> None:
    config = from_overrides(
        f"trainer.num_steps={num_steps}", f"trainer.num_epochs={num_epochs}", "trainer.policy_mini_batch_size=4"
    )
    assert num_planned_steps(config, prompts(10)) == expected


@pytest.mark.parametrize("num_steps", ["null", "50"])
def test_a_critic_whose_warm_up_outlasts_the_epochs_is_refused(num_steps: str) -> None:
    def config(*overrides: str) -> Config:
        epochs = (f"trainer.num_steps={num_steps}", "trainer.num_epochs=3", "trainer.policy_mini_batch_size=4")
        return from_overrides(*epochs, "trainer.critic.warmup_steps=8", *overrides)

    check_critic_warmup(config(), prompts(10))
    check_critic_warmup(config(GAE), prompts(11))
    check_critic_warmup(config(GAE), prompts(0))
    with pytest.raises(
        ConfigError, match=r"must be < 8, the steps that .*num_epochs=3 of 10 prompts hold, got 8: the policy"
    ):
        check_critic_warmup(config(GAE), prompts(10))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_learning_rate_reaches_zero_at_the_end_of_a_run_that_epochs_end(schedule: str) -> None:
    config = from_overrides("trainer.num_steps=null", "trainer.num_epochs=2", f"training.lr_schedule={schedule}")
    num_steps = num_planned_steps(config, prompts(40))
    settings = replace(training_settings(config, Path("unused"), num_steps), num_warmup_steps=0)
    factors = [lr_factor(step, settings) for step in range(num_steps + 1)]
    assert num_steps == 10
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(0.0) and factors == sorted(factors, reverse=True)


class TestLogprobs:
    """Who computes which log-probs."""

    @pytest.mark.slow
    def test_policy_workers_hold_the_reference_unless_it_has_workers_of_its_own(self) -> None:
        def settings(*overrides: str) -> TrainingSettings:
            return training_settings(from_overrides(*overrides), Path("unused"), 1)

        kl = ("trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.1")
        assert (settings().has_reference, settings().kl_estimator, settings().kl_coef) == (False, None, 0.0)
        assert (settings(*kl).has_reference, settings(*kl).kl_estimator, settings(*kl).kl_coef) == (True, "k3", 0.1)
        assert not settings(*kl, "training.num_ref_workers=1").has_reference
        assert settings(*kl, "training.num_ref_workers=1").kl_estimator == "k3"

    @pytest.mark.parametrize(
        ("overrides", "stages"),
        [
            ((), []),
            (("trainer.algorithm.use_kl_loss=true",), ["ref_logp"]),
            (("trainer.algorithm.use_kl_loss=true", "trainer.algorithm.ref_logp=inline"), []),
            (("trainer.algorithm.policy_loss_type=decoupled_ppo",), ["logp"]),
            ((GAE,), ["logp"]),
            (("trainer.algorithm.advantage_estimator=tests.cpu.own_algorithms:ratio_advantages",), ["logp"]),
            ((GAE, "trainer.algorithm.vtrace_clip=null"), []),
            ((GAE, "trainer.max_staleness_steps=0"), []),
        ],
    )
    def test_a_loss_or_an_estimator_that_needs_log_probs_gets_a_stage_for_them(
        self, overrides: tuple[str, ...], stages: list[str]
    ) -> None:
        assert list(stage_works(from_overrides(*overrides), ModelledPolicy(), LogprobParts(), {})) == stages

    async def test_a_group_goes_through_both_stages_on_the_policy_workers_where_there_are_no_others(self) -> None:
        config = from_overrides(
            "trainer.algorithm.use_kl_loss=true", "trainer.algorithm.policy_loss_type=decoupled_ppo"
        )
        works = stage_works(config, ModelledPolicy(), LogprobParts(), {})
        assert list(works) == ["ref_logp", "logp"]
        row = Trajectory(
            prompt_token_ids=(1,), response_token_ids=(2,), loss_mask=(1,), logprobs=(-2.0,), versions=(0,), reward=0.0
        )
        group = Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(row,))
        for work in works.values():
            group = await work(group)
        assert group.trajectories == (replace(row, ref_logprobs=(-1.0,), old_logprobs=(-1.0,), old_version=0),)

    @pytest.mark.parametrize(
        ("key", "user"),
        [
            ("trainer.ref.path", "trainer.algorithm.use_kl_loss=true"),
            ("trainer.critic.model.path", GAE),
        ],
    )
    def test_a_model_beside_the_policy_with_other_tokens_is_refused_before_anything_boots(
        self, key: str, user: str, tmp_path: Path
    ) -> None:
        for name, num_tokens in (("policy", 48), ("same", 48), ("other", 48), ("larger", 64)):
            policy_directory(tmp_path / name)
            (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": num_tokens, "model_type": "qwen3"}))
            write_tokenizer(tmp_path / name, word="v" if name == "other" else "w")

        def check(name: str) -> None:
            check_logprobs(from_overrides(user, f"{key}={tmp_path / name}"), tmp_path / "policy")

        check("policy")
        check("same")
        with pytest.raises(PolicyError, match=rf"{key}=.*larger has 64 tokens and the policy 48"):
            check("larger")
        with pytest.raises(
            PolicyError, match=rf"{key}=.*other must have the policy's tokens: 1 is 'v1' there and 'w1' here"
        ):
            check("other")


@pytest.mark.parametrize("cache", ["/proc/nope", "x" * 300])
def test_a_cache_that_cannot_be_written_to_is_named_by_its_key(cache: str) -> None:
    files = PolicyFiles(config_of(f"cache_dir={cache}"), prompts(1), lambda line: None)
    with pytest.raises(ConfigError, match=f"cache_dir must be a directory that can be written to, got '{cache}"):
        files.initial()


def test_a_private_file_is_its_owner_s_whatever_was_there(tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text("older, and for everybody")
    write_private(tmp_path / "endpoint.json", "secret")
    assert (tmp_path / "endpoint.json").read_text() == "secret"
    assert (tmp_path / "endpoint.json").stat().st_mode & 0o77 == 0


class Closable:
    async def close(self) -> None:
        pass


class Files:
    async def served(self) -> Path:
        return Path("unused")

    async def trained(self) -> Path:
        return Path("trained")


@pytest.mark.parametrize(
    ("device", "share", "first"),
    [("cuda", 0.5, "engines are up"), ("cuda", 1.0, "policy loads"), ("cpu", 0.5, "policy loads")],
)
def test_workers_load_the_policy_beside_booting_engines_unless_these_count_the_memory_of_the_same_gpu(
    device: str, share: float, first: str
) -> None:
    happened = []

    class Watched(Processes):
        async def _start_engines(self) -> list[Closable]:  # type: ignore[override]
            await asyncio.sleep(60.0)
            happened.append("engines are up")
            return [Closable()]

        async def _start_policy(self, trained: Callable[[], Awaitable[Path]], num_steps: int) -> Closable:  # type: ignore[override]
            assert await trained() == Path("trained")
            happened.append("policy loads")
            return Closable()

    async def main() -> None:
        config = Config(
            engine=EngineConfig(device=Device[device]),
            training=TrainingConfig(device=Device[device]),
            placement=PlacementConfig(num_gpus_per_engine=share, num_gpus_per_worker=share),
        )
        path = Path("unused")
        async with contextlib.AsyncExitStack() as stack:
            await Watched(config, Files(), path, path, stack, None).engines_and_policy(1)  # type: ignore[arg-type]

    run_in_virtual_time(main())
    assert happened[0] == first and set(happened) == {"engines are up", "policy loads"}


def test_the_rows_of_a_step_that_is_not_finite_go_to_the_runs_directory(tmp_path: Path) -> None:
    found = []

    class Watched(Processes):
        async def _start_engines(self) -> list[Closable]:  # type: ignore[override]
            return []

        async def _start_workers(self, stage: str, settings: TrainingSettings, **_: object) -> Closable:  # type: ignore[override]
            found.append(settings)
            return Closable()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            processes = Watched(Config(), Files(), Path("unused"), tmp_path, stack, None)  # type: ignore[arg-type]
            await processes.engines_and_policy(7)

    run_in_virtual_time(main())
    (settings,) = found
    assert settings == replace(training_settings(Config(), Path("unused"), 7), bad_step_dir=str(tmp_path / "bad_step"))


@pytest.mark.parametrize("has_head", [False, True], ids=["policy", "value_model"])
async def test_a_critic_begins_with_the_weights_of_its_own_directory_and_learns_at_its_own_rate(
    tmp_path: Path, has_head: bool
) -> None:
    """The configuration's, in a real worker that is in this process."""
    policy, other = (write_policy(tmp_path / name, seed=seed) for seed, name in enumerate(("policy", "other")))
    if has_head:
        AutoModelForSequenceClassification.from_pretrained(other, num_labels=1).save_pretrained(other)

    class InThisProcess(Processes):
        async def _start_workers(self, stage: str, settings: TrainingSettings, **arguments: object) -> InProcessPolicy:  # type: ignore[override]
            assert stage == "critic" and arguments["policy_path"] is None
            return InProcessPolicy(settings)

    gae = (GAE, f"policy.path={policy}", "training.num_warmup_steps=0")
    write_tokenizer(policy)
    config = from_overrides(*gae, f"trainer.critic.model.path={other}", "trainer.critic.optimizer_config.lr=0.0125")
    async with contextlib.AsyncExitStack() as stack:
        processes = InThisProcess(config, Files(), policy, tmp_path, stack, None)  # type: ignore[arg-type]
        critic = await processes.critic(1)
        assert critic is not None
        begins_with = await weights(critic, tmp_path / "gathered")
        await critic.forward_backward(trajectories(2, seed=0), [1.0, 0.5], 0)
        assert (await critic.step(1.0))["lr"] == 0.0125
    expected, head = load_file(other / "model.safetensors"), "lm_head.weight"
    assert ("score.weight" in expected, head in expected) == (has_head, not has_head)
    if has_head:
        expected[head] = expected.pop("score.weight")
    else:
        assert begins_with.pop(head).shape == (1, expected.pop(head).shape[1])
    assert_close(begins_with, expected)


async def test_a_critic_is_trained_by_the_policys_optimizer_but_for_what_is_its_own(tmp_path: Path) -> None:
    """In a real worker, whose clipped gradient moves nothing, so that weights decay alone."""
    policys = (GAE, "training.weight_decay=0.5", "training.max_grad_norm=2.0", "training.num_warmup_steps=7")
    own = ("lr=0.04", "weight_decay=0.25", "max_grad_norm=1e-30", "num_warmup_steps=4")
    path = write_policy(tmp_path / "policy")
    alike = critic_settings(config_of(*policys), path, 9)
    assert (alike.weight_decay, alike.max_grad_norm, alike.num_warmup_steps) == (0.5, 2.0, 7)
    overrides = (*(f"trainer.critic.optimizer_config.{key}" for key in own), "trainer.algorithm.value_clip=0.75")
    settings = critic_settings(config_of(*policys, *overrides), path, 9)
    assert settings.value_clip == 0.75
    critic = InProcessPolicy(settings)
    before = await weights(critic, tmp_path / "before")
    await critic.forward_backward(trajectories(2, seed=0), [1.0, 0.5], 0)
    assert (await critic.step(1.0))["lr"] == pytest.approx(0.04 / 4)
    assert_close(
        await weights(critic, tmp_path / "after"), {k: (1 - 0.01 * 0.25) * v for k, v in before.items()}, atol=1e-6
    )
    await critic.close()


def test_a_tokenizer_that_was_not_downloaded_whole_is_named(tmp_path: Path) -> None:
    write_policy(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 9\n")
    with pytest.raises(PolicyError, match=rf"the tokenizer in {tmp_path} cannot be read \(.*\); download files that"):
        load_renderer(tmp_path, trust_remote_code=False)
