"""Contracts 3, 7 and 9 bit for bit: the real loop, client, generator, FSDP2 policy and publisher over the deterministic engine."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.algorithms.advantages import make_advantage_estimator
from skyrl_async.algorithms.estimators.outcome import grpo_advantages
from skyrl_async.algorithms.history import PromptRewards
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.chat import ChatRenderer
from skyrl_async.checkpoint.checkpointer import Checkpointer, read_state
from skyrl_async.composition.parts import critic_training
from skyrl_async.composition.time_sharing import lease_of, leasing_policy, on_leased_devices
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.generator import GeneratorConfig, SamplingConfig
from skyrl_async.config.schema.policy import LoraConfig, LoraPublish
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import GuardConfig, TrainerConfig
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import CountsSamples
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.preparation import reward_with
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.runtime.device_leases import DeviceGroup, groups_by_member
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.tasks.tiny_policy import PolicySizes, build_tiny_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import TrainerCallbacks, make_run
from skyrl_async.trainer.validation import Evaluator
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.logprob_workers import ColumnStageWork
from skyrl_async.types import LogprobModel, PauseMode, Prompt, SamplingParams
from skyrl_async.weight_sync.engine_time_sharing import GENERATE, EngineTimeSharing
from skyrl_async.weight_sync.publisher import WeightPublisher

SIZES = PolicySizes(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
SAMPLING = SamplingParams(max_tokens=14)
NUM_STEPS = 3


class DialogueEnv:
    """Speaks up to five times, as long as what it hears pleases it, and remembers all of it."""

    is_fast = True

    def __init__(self) -> None:
        self.heard: list[str] = []

    def init(self, prompt: list) -> tuple[list, dict]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.heard.append(action)
        is_over = sum(map(ord, action)) % 3 == 0 or len(self.heard) == 5
        observations = [] if is_over else [{"role": "user", "content": str(len(self.heard))}]
        reward = sum(map(ord, "".join(self.heard))) % 7 / 7
        return {"observations": observations, "reward": reward, "done": is_over, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def snapshot(self) -> list[str]:
        return self.heard

    def restore(self, state: list[str]) -> None:
        self.heard = state


class LettersEnv:
    """Rewards whatever varies between answers of an untrained policy."""

    is_fast = True

    def init(self, prompt: list) -> tuple[list, dict]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": sum(map(ord, action)) % 7 / 7, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


ENVIRONMENTS = {"letters": LettersEnv, "dialogue": DialogueEnv}


@dataclass(frozen=True, kw_only=True)
class Job:
    num_steps: int = NUM_STEPS
    """Batches."""
    max_staleness_steps: int = 0
    stream_mini_batch: bool | None = None
    micro_batch_tokens: int = 4096
    checkpoint_interval_steps: int = 0
    check_interval_steps: int = 1
    publishes_between_batches: bool = False
    env_class: str = "letters"
    sampling: SamplingParams = SAMPLING
    shared_by: tuple[tuple[str, ...], ...] = ()
    """Groups of stages on the same devices."""
    training: dict[str, Any] = field(default_factory=dict)
    """More settings of the policy; with ``teacher_coef`` there is a teacher, the initial policy."""
    estimator: str = "grpo"
    """``gae`` brings a critic."""
    critic_warmup_steps: int = 0
    num_mini_batches: int = 1
    """Of a batch."""
    num_epochs: int = 1
    """Passes over a batch."""
    guard: GuardConfig = field(default_factory=GuardConfig)


STOPPED = Job(sampling=SamplingParams(max_tokens=40, stop=("e", "a", "S")), check_interval_steps=0)
"""Answers of many lengths, streamed by the client."""
DIALOGUE = Job(env_class="dialogue")
"""Episodes of many turns; their checkpoints come a probe's time after the publish."""


@dataclass
class Running:
    trainer: FullyAsyncTrainer
    engine: DeterministicEngine
    policy: InProcessPolicy
    critic: InProcessPolicy | None
    teacher: InProcessPolicy | None
    publisher: WeightPublisher
    workers: GenerationWorkers
    dataloader: _AsyncDataloader
    staleness: _AsyncStalenessManager
    turns: EngineTimeSharing | None
    device_groups: Mapping[str, DeviceGroup]
    logged: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    checksum: str
    critic: str = ""
    """Checksum of its weights; empty without one."""


def checksum_of(model: InProcessPolicy | None) -> str:
    """SHA-256 over names and bytes of the weights that a model trains."""
    backend: Any = None if model is None else model._rank._backend
    digest = hashlib.sha256()
    for name, tensor in () if backend is None else backend.iter_full_params():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return "" if backend is None else digest.hexdigest()


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy") / "tiny"
    build_tiny_policy(directory, SIZES, train_tokenizer(["Say something."] * 2), seed=0)
    return directory


class InFlight(TrainerConfig):
    """Deterministic in everything but when weights change."""

    publishes_between_batches = False


def config_of(job: Job) -> Config:
    trainer = (TrainerConfig if job.publishes_between_batches else InFlight)(
        max_staleness_steps=job.max_staleness_steps,
        num_parallel_generation_workers=3 * (job.max_staleness_steps + 1) // job.num_epochs,
        count_buffered_as_in_flight=False,
        policy_mini_batch_size=3,
        num_steps=job.num_steps * job.num_mini_batches * job.num_epochs,
        train_batch_size=3 * job.num_mini_batches,
        update_epochs_per_batch=job.num_epochs,
        stream_mini_batch=job.stream_mini_batch,
        deterministic=True,
        eval_interval_steps=0,
        checkpoint_interval_steps=job.checkpoint_interval_steps,
        logprob_probe_interval_steps=job.check_interval_steps,
        stall_warning_s=math.inf,
        guard=job.guard,
    )
    generator = GeneratorConfig(
        n_samples_per_prompt=3,
        max_retries=0,
        rollout_timeout_s=1e6,
        max_failed_fraction=0.0,
        sampling=from_section(SamplingConfig, job.sampling, stop=list(job.sampling.stop)),
    )
    trainer.critic.warmup_steps = job.critic_warmup_steps
    return Config(trainer=trainer, generator=generator)


def build(job: Job, policy_dir: Path, directory: Path) -> Running:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    trace = Trace(None, asyncio.get_running_loop().time)
    settings = TrainingSettings(policy_path=str(policy_dir), lr=1e-2, micro_batch_tokens=job.micro_batch_tokens)
    settings = replace(settings, **job.training)
    adapter = settings.published_adapter
    engine = DeterministicEngine(
        "engine-0",
        policy_dir,
        adapter_rank=0 if adapter is None else adapter.rank,
        max_model_len=256,
        seconds_per_token=0.01,
    )
    client = InferenceEngineClient([engine], tokenizer=tokenizer, max_model_len=256)
    policy = InProcessPolicy(settings)
    groups = groups_by_member(job.shared_by)
    leasing = leasing_policy(policy, groups)
    clock = asyncio.get_running_loop().time
    turns = None
    if GENERATE in groups:
        turns = EngineTimeSharing(
            client,
            groups[GENERATE],
            min_slice_s=0.05,
            is_busy=lambda: client.pool.is_busy,
            trace=trace,
            clock=clock,
        )
    publisher = WeightPublisher(
        client=client,
        policy=leasing,
        hold_engines=turns.holding if turns else nullcontext,
        directory=directory / "buckets",
        bucket_bytes=1 << 20,
        pause_mode=PauseMode.ABORT,
        trace=trace,
        probe_prompt_token_ids=(5, 6, 7),
        max_logprob_gap=1e-4,
    )
    prompts = [
        Prompt(uid=f"p{i}", messages=({"role": "user", "content": f"Say {i}."},), env_class=job.env_class)
        for i in range(10)
    ]
    dataloader = _AsyncDataloader(prompts, seed=0)
    running: list[Running] = []
    generator = GymGenerator(
        client, ChatRenderer(tokenizer), make_environment=lambda name, extras: ENVIRONMENTS[name]()
    )
    config = config_of(job)
    run = make_run(
        config,
        dataloader=dataloader,
        client=client,
        generator=generator,
        callbacks=TrainerCallbacks(log=lambda step, values: running[0].logged.append(values)),
        trace=trace,
    )
    estimator = make_advantage_estimator(job.estimator, AdvantageConstants(lambd=0.9))
    critic = InProcessPolicy(replace(settings, is_critic=True)) if estimator.needs_values else None
    of_step = estimator if critic or estimator.needs_baseline else None
    history = PromptRewards(decay=0.9) if estimator.needs_baseline else None
    prepare: dict[str, Any] = {"reward": reward_with(None if of_step else estimator)}
    teacher = InProcessPolicy(replace(settings, trains=False, num_top_tokens=4)) if settings.teacher_coef else None
    if teacher is not None:
        likely = partial(teacher.logprobs_of, model=LogprobModel.POLICY)
        prepare["teacher_logp"] = ColumnStageWork(likely, "teacher_logprobs")
    if critic is not None:
        prepare["values"] = on_leased_devices(ColumnStageWork(critic.values_of, "values"), "critic", groups)
    trainer = FullyAsyncTrainer(
        run,
        policy=leasing,
        publisher=publisher,
        prepare=prepare,
        step_advantages=StepAdvantages(of_step, history=history),
        critic=critic_training(config, critic, groups),
        evaluator=Evaluator(config, generator, prompts=[], record=CountsSamples()),
        checkpointer=Checkpointer(directory / "checkpoints", max_to_keep=0),
        lease=lease_of("policy", groups),
    )
    running.append(
        Running(
            trainer, engine, policy, critic, teacher, publisher, run.workers, dataloader, run.staleness, turns, groups
        )
    )
    return running[0]


def train(
    job: Job, policy_dir: Path, directory: Path, before: Callable[[Running], Any] = lambda running: None
) -> Outcome:
    async def main() -> Outcome:
        running = build(job, policy_dir, directory)
        try:
            preparation = before(running)
            if preparation is not None:
                await preparation
            async with running.turns.running() if running.turns else nullcontext():
                await running.trainer.run()
            losses = [values["policy/loss"] for values in running.logged if "policy/loss" in values]
            return Outcome(losses, await running.engine.checksum(), checksum_of(running.critic))
        finally:
            for model in (running.policy, running.critic, running.teacher):
                if model is not None:
                    await model.close()

    return run_in_virtual_time(main())


def plain_loop(policy_dir: Path, directory: Path) -> Outcome:
    """Generate a mini-batch, train on it group by group, publish; no trainer, no workers, no buffer, no staleness."""

    async def main() -> Outcome:
        running = build(Job(), policy_dir, directory)
        losses: list[float] = []
        await running.publisher.publish(0)
        for step in range(NUM_STEPS):
            drawn = [await running.dataloader.get_next_non_consumed_data() for _ in range(3)]
            groups = [
                await running.workers._retrier.generate(request(prompt, 3 * step + i))
                for i, (_, prompt) in enumerate(drawn)
            ]
            figures = [
                await running.policy.forward_backward(g, grpo_advantages([t.reward for t in g]), step) for g in groups
            ]
            num_tokens = sum(t.num_sampled_tokens for g in groups for t in g)
            await running.policy.step(num_tokens)
            losses.append(sum(f["loss_sum"] for f in figures) / num_tokens)
            await running.publisher.publish(step + 1)
        checksum = await running.engine.checksum()
        await running.policy.close()
        return Outcome(losses, checksum)

    return run_in_virtual_time(main())


@pytest.fixture(scope="module")
def synchronous(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The plain job: no staleness, streamed, whole mini-batches at once."""
    return train(Job(), policy_dir, tmp_path_factory.mktemp("synchronous"))


def request(prompt: Prompt, index: int) -> GroupRequest:
    from random import Random

    seed = Random(f"0-{index}").getrandbits(31)
    return GroupRequest(prompt=prompt, num_samples=3, sampling=SAMPLING, seed=seed, priority=index)


@pytest.mark.slow
def test_contract_3_staleness_zero_gives_the_losses_and_weights_of_a_plain_loop_bit_for_bit(
    policy_dir: Path, synchronous: Outcome, tmp_path: Path
) -> None:
    assert synchronous == plain_loop(policy_dir, tmp_path)
    assert len(set(synchronous.losses)) == NUM_STEPS


@pytest.mark.slow
def test_engines_that_share_their_devices_with_the_policy_change_no_bit_of_the_losses(
    policy_dir: Path, synchronous: Outcome, tmp_path: Path
) -> None:
    """Its probes and its publishes come in turns too."""
    assert synchronous == train(Job(shared_by=(("policy", "generate"),)), policy_dir, tmp_path)


@pytest.mark.slow
def test_nor_does_it_of_dialogues_whose_episodes_are_frozen_in_any_turn(policy_dir: Path, tmp_path: Path) -> None:
    job = Job(env_class="dialogue")
    shared = train(replace(job, shared_by=(("policy", "ref", "generate"),)), policy_dir, tmp_path / "shared")
    assert shared == train(job, policy_dir, tmp_path / "separate")


@pytest.mark.slow
def test_contract_9_streamed_accumulation_equals_the_whole_mini_batch_bit_for_bit(
    policy_dir: Path, synchronous: Outcome, tmp_path: Path
) -> None:
    assert synchronous == train(Job(stream_mini_batch=False), policy_dir, tmp_path)


@pytest.mark.slow
def test_adapters_published_alone_give_the_losses_and_weights_of_merged_ones_bit_for_bit(
    policy_dir: Path, synchronous: Outcome, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=4, alpha=12.0)
    merged = train(Job(training={"lora": lora}), policy_dir, tmp_path / "merged")
    alone = train(Job(training={"lora": replace(lora, publish=LoraPublish.adapter)}), policy_dir, tmp_path / "alone")
    assert alone == merged and alone.checksum != synchronous.checksum
    (served,) = (tmp_path / "alone" / "buckets").iterdir()  # of those before nothing is left
    assert served.name.startswith(f"{NUM_STEPS:06d}")


@pytest.mark.slow
def test_contract_9_the_micro_batch_size_does_not_change_the_losses(
    policy_dir: Path, synchronous: Outcome, tmp_path: Path
) -> None:
    small = train(Job(micro_batch_tokens=1), policy_dir, tmp_path)
    assert small.losses == pytest.approx(synchronous.losses, abs=1e-5)


@pytest.mark.slow
def test_two_runs_of_the_same_job_are_equal_bit_for_bit_at_any_staleness(policy_dir: Path, tmp_path: Path) -> None:
    job = Job(max_staleness_steps=2)
    assert train(job, policy_dir, tmp_path / "a") == train(job, policy_dir, tmp_path / "b")


def slow_by(seconds: float) -> Callable[[Running], None]:
    """Have every call of the policy take so long."""

    def delay(running: Running) -> None:
        forward_backward = running.policy.forward_backward

        async def delayed(*arguments: Any) -> dict[str, float]:
            await asyncio.sleep(seconds)
            return await forward_backward(*arguments)

        running.policy.forward_backward = delayed  # type: ignore[method-assign]

    return delay


@pytest.mark.slow
def test_with_weights_that_change_between_batches_a_run_does_not_depend_on_how_long_anything_takes(
    policy_dir: Path, tmp_path: Path
) -> None:
    """What ``trainer.deterministic`` asks for: the same losses and weights, whichever of engine and trainer is the slower."""
    still = Job(num_steps=4, max_staleness_steps=2, publishes_between_batches=True, check_interval_steps=0)
    in_flight = replace(still, publishes_between_batches=False)

    def outcomes(job: Job) -> tuple[Outcome, Outcome]:
        fast = train(job, policy_dir, tmp_path / "fast")
        return fast, train(job, policy_dir, tmp_path / "slow", slow_by(0.02))

    same, slow = outcomes(still)
    assert same == slow
    other, slow = outcomes(in_flight)
    assert other != slow, "publishes fall into the middle of answers"


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_the_configuration_s_key_changes_weights_between_batches(is_deterministic: bool) -> None:
    config = from_overrides(f"trainer.deterministic={str(is_deterministic).lower()}")
    assert config.trainer.publishes_between_batches == is_deterministic


@pytest.mark.parametrize(
    ("max_staleness_steps", "job"),
    [
        pytest.param(0, STOPPED, marks=pytest.mark.slow),
        pytest.param(2, STOPPED, marks=pytest.mark.slow),
        pytest.param(2, DIALOGUE, marks=pytest.mark.slow),
        pytest.param(
            2, replace(STOPPED, publishes_between_batches=True), marks=pytest.mark.slow, id="2-between-batches"
        ),
        pytest.param(0, replace(STOPPED, estimator="running_mean"), marks=pytest.mark.slow, id="0-running-mean"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else value.env_class,
)
def test_contract_7_a_resumed_run_has_the_losses_and_weights_of_one_that_was_not_killed(
    policy_dir: Path, tmp_path: Path, max_staleness_steps: int, job: Job
) -> None:
    """The checkpoint falls on a publish, which begins every token anew, or on a tick of the one clock that all tokens share."""
    job = replace(job, max_staleness_steps=max_staleness_steps)
    whole = train(job, policy_dir, tmp_path / "whole")

    def die_in_step_2(running: Running) -> None:
        step = running.policy.step

        async def dying(num_tokens: int, *lr_scale: float) -> dict[str, float]:
            if running.trainer.served_version == 1:
                raise KeyboardInterrupt
            return await step(num_tokens, *lr_scale)

        running.policy.step = dying  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        train(replace(job, checkpoint_interval_steps=1), policy_dir, tmp_path / "killed", die_in_step_2)
    latest = Checkpointer(tmp_path / "killed" / "checkpoints", max_to_keep=0).usable().path
    assert latest is not None and latest.name == "global_step_1"
    running_groups = read_state(latest).running
    assert all(group.num_kept == group.num_samples for group in running_groups)
    has_begun = max_staleness_steps > 0 and not job.publishes_between_batches
    assert (sum(group.num_sampled_tokens for group in running_groups) > 0) == has_begun
    resumed = train(job, policy_dir, tmp_path / "resumed", lambda running: running.trainer.resume(latest))
    assert resumed == replace(whole, losses=whole.losses[1:])
