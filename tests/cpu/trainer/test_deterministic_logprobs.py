"""Training with a reference and with recomputed log-probs, bit for bit: the real loop, policy and publisher over the deterministic
engine."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.checkpoint.checkpointer import Checkpointer, read_state
from skyrl_async.composition.logprobs import LogprobParts, stage_works
from skyrl_async.composition.time_sharing import lease_of
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.placement import sharing_stages
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.logprob_workers import ForwardWorkers, LogprobWorkers
from tests.cpu.trainer.test_deterministic_run import STOPPED, Job, Outcome, Running, policy_dir, train

__all__ = ["policy_dir"]
KL = {"kl_estimator": "k2", "kl_coef": 0.5}
ASKING_FOR_BOTH = ("trainer.algorithm.use_kl_loss=true", "trainer.algorithm.policy_loss_type=decoupled_ppo")
BOTH = from_overrides(*ASKING_FOR_BOTH)
REF_ONLY = from_overrides("trainer.algorithm.use_kl_loss=true")


class Apart:
    """Gives a run workers of their own for both kinds of log-probs; ``before`` is for ``train``."""

    def __init__(self, policy_dir: Path) -> None:
        self._settings = TrainingSettings(policy_path=str(policy_dir), trains=False)
        self._started: list[LogprobWorkers] = []

    async def _workers(self, name: str, running: Running) -> LogprobWorkers:
        async def start() -> ForwardWorkers:
            return InProcessPolicy(self._settings)

        lease = lease_of(name, running.device_groups)
        self._started.append(await LogprobWorkers(start, max_restarts=0, device_lease=lease).started())
        return self._started[-1]

    async def close(self) -> None:
        for workers in self._started:
            await workers.close()

    def before(self, *, resume: Path | None = None) -> Callable[[Running], Awaitable[None]]:
        async def prepare(running: Running) -> None:
            parts = LogprobParts(ref=await self._workers("ref", running), old=await self._workers("logp", running))
            complete_by(running, parts, config=BOTH)
            running.publisher.followers = (parts.old.load_weights,)
            if resume is not None:
                await running.trainer.resume(resume)

        return prepare


@pytest.fixture
def apart(policy_dir: Path) -> Iterator[Apart]:
    workers = Apart(policy_dir)
    yield workers
    asyncio.run(workers.close())


def complete_by(running: Running, parts: LogprobParts, *, config=BOTH) -> None:
    running.trainer._preparation._steps.update(stage_works(config, running.policy, parts, running.device_groups))


def divergences(job: Job, policy_dir: Path, directory: Path, before) -> tuple[Outcome, list[float]]:
    found: list[list[dict[str, float]]] = []

    def prepare(running: Running):
        found.append(running.logged)
        return before(running)

    outcome = train(job, policy_dir, directory, prepare)
    return outcome, [values["policy/ref_kl"] for values in found[0] if "policy/ref_kl" in values]


@pytest.mark.slow
def test_a_reference_gives_the_same_losses_and_weights_wherever_and_whenever_it_runs(
    policy_dir: Path, tmp_path: Path, apart: Apart
) -> None:
    job = Job(max_staleness_steps=2, training={**KL, "has_reference": True})
    inline = divergences(job, policy_dir, tmp_path / "inline", lambda running: None)
    on_policy_workers = divergences(
        job, policy_dir, tmp_path / "shared", lambda running: complete_by(running, LogprobParts(), config=REF_ONLY)
    )
    on_their_own = divergences(replace(job, training=KL), policy_dir, tmp_path / "apart", apart.before())
    assert inline == on_policy_workers == on_their_own
    _, found = inline
    assert found[0] == 0.0 and all(divergence > 0 for divergence in found[1:])


@pytest.mark.slow
def test_recomputed_log_probs_make_the_same_run_on_the_policy_workers_and_on_workers_that_load_what_is_published(
    policy_dir: Path, tmp_path: Path, apart: Apart
) -> None:
    job = Job(training={"policy_loss": "decoupled_ppo"})
    decoupled = from_overrides("trainer.algorithm.policy_loss_type=decoupled_ppo")
    shared = train(
        job, policy_dir, tmp_path / "a", lambda running: complete_by(running, LogprobParts(), config=decoupled)
    )
    assert train(job, policy_dir, tmp_path / "b", apart.before()) == shared
    assert len(set(shared.losses)) == len(shared.losses)


def job_placed(groups: str) -> Job:
    """Training with both kinds of log-probs, each on workers of its own."""
    num_groups = groups.count("],") + 1
    config = from_overrides(
        "engine=deterministic",
        *ASKING_FOR_BOTH,
        "training.num_ref_workers=1",
        "training.num_logp_workers=1",
        f"placement.groups={groups}",
        f"placement.ratios=[{','.join([str(1 / num_groups)] * num_groups)}]",
        "placement.num_cpu_slots=4",
    )
    return Job(training={**KL, "policy_loss": "decoupled_ppo"}, shared_by=sharing_stages(config))


@pytest.mark.slow
def test_separate_hybrid_and_shared_placements_give_the_same_losses_and_weights(
    policy_dir: Path, tmp_path: Path, apart: Apart
) -> None:
    found = {}
    for groups, sharing in {
        "[[policy],[ref],[logp],[generate]]": set(),
        "[[policy,logp],[ref],[generate]]": {"policy", "logp"},
        "[[policy,logp,ref,generate]]": {"policy", "logp", "ref", "generate"},
    }.items():

        def prepare(running: Running, sharing: set[str] = sharing) -> Awaitable[None]:
            assert set(running.device_groups) == sharing
            return apart.before()(running)

        found[groups] = train(job_placed(groups), policy_dir, tmp_path / groups, prepare)
    separate, hybrid, shared = found.values()
    for other in (hybrid, shared):
        assert other.losses == pytest.approx(separate.losses, abs=1e-6)
        assert other.checksum == separate.checksum
    assert len(set(separate.losses)) == len(separate.losses)


@pytest.mark.slow
def test_contract_7_a_resumed_run_with_both_kinds_of_log_probs_has_the_losses_and_weights_of_one_that_was_not_killed(
    policy_dir: Path, tmp_path: Path, apart: Apart
) -> None:
    job = replace(STOPPED, max_staleness_steps=3, training={**KL, "policy_loss": "decoupled_ppo"})
    whole = train(job, policy_dir, tmp_path / "whole", apart.before())

    def until_step_2(running: Running):
        step = running.policy.step

        async def dying(num_tokens: float, *lr_scale: float) -> dict[str, float]:
            if running.trainer.served_version == 1:
                raise KeyboardInterrupt
            return await step(num_tokens, *lr_scale)

        running.policy.step = dying  # type: ignore[method-assign]
        return apart.before()(running)

    with pytest.raises(KeyboardInterrupt):
        train(replace(job, checkpoint_interval_steps=1), policy_dir, tmp_path / "killed", until_step_2)
    latest = Checkpointer(tmp_path / "killed" / "checkpoints", max_to_keep=0).usable().path
    rows = [row for group in read_state(latest).groups for row in group.trajectories]
    assert rows and all(row.ref_logprobs is None and row.old_logprobs is not None for row in rows)
    resumed = train(job, policy_dir, tmp_path / "resumed", apart.before(resume=latest))
    assert resumed == replace(whole, losses=whole.losses[1:])
