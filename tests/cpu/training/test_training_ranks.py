"""Every backend on one rank in this process and on two over gloo, compared with FSDP2 on one rank, in float32 on the same rows."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_async.algorithms.settings import CorrectionSettings
from skyrl_async.config.schema.policy import LoraConfig
from skyrl_async.config.schema.training import DeepSpeedConfig
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import PolicyOverRanks
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import LogprobModel, RowLogprobs
from tests.cpu import tiny_policies
from tests.cpu.tiny_policies import assert_close, full_copy, trajectories, weights, write_policy
from tests.cpu.two_ranks import OneOfTwo, RankPair

pytestmark = pytest.mark.slow

NUM_STEPS = 2
WAYS = (
    "fsdp",
    "fsdp_lora",
    "fsdp_tied",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_lora",
    "zero3_lora",
    "zero3_tied",
    "fsdp_critic",
    "zero0_critic",
    "zero3_critic",
)
OTHER_WAY = {
    "fsdp": "zero3",
    "zero3": "zero1",
    "zero1": "zero0",
    "zero0": "fsdp",
    "zero2": "zero2",
    "fsdp_lora": "zero3_lora",
    "fsdp_tied": "zero3_tied",
    "zero3_tied": "fsdp_tied",
    "fsdp_critic": "zero3_critic",
    "zero3_critic": "fsdp_critic",
}
"""Who wrote a checkpoint -> who takes it up, on another number of ranks: another backend or stage."""
Make = Callable[[TrainingSettings], InProcessPolicy]
train = partial(tiny_policies.train, has_columns=True)
CORRECTIONS = {
    "tied": {
        "policy_loss": "ppo_clip",
        "correction": CorrectionSettings(outlier_mask=(0.03, 8.0)),
        "teacher_coef": 0.1,
    },
    "": {"policy_loss": "rollout_is", "correction": CorrectionSettings(token_tis=2.0, token_mask=(0.1, 4.0))},
}

ROUNDING = 2e-5
"""A fiftieth of the learning rate, by which Adam moves every weight: where a gradient is next to none, rounding is a part of it. Processors
round in ways of their own."""


def settings_of(way: str, directory: Path) -> TrainingSettings:
    policy = directory / ("tied_policy" if way.endswith("tied") else "policy")
    settings = TrainingSettings(policy_path=str(policy), lr=1e-3, num_warmup_steps=2, entropy_coef=0.05)
    settings = replace(settings, **CORRECTIONS["tied" if way.endswith("tied") else ""])
    if way.startswith("zero"):
        # A few tokens at a time: with ZeRO-3 the head is gathered for each of them, and again in the backward pass.
        settings = replace(settings, deepspeed=DeepSpeedConfig(zero_stage=int(way[4])), logprobs_chunk_size=5)
    if way.endswith("lora"):
        lora = LoraConfig(rank=3, alpha=6.0)
        settings = replace(settings, lora=lora, has_reference=True, kl_estimator="k3", kl_coef=0.1)
    if way.endswith("critic"):
        settings = replace(settings, is_critic=True, value_clip=0.5)
    return settings


async def outputs(policy: PolicyOverRanks, settings: TrainingSettings) -> RowLogprobs:
    """A critic's values, or log-probs under the reference where there is one."""
    rows = trajectories(5, seed=3)
    if settings.is_critic:
        return await policy.values_of(rows)
    return await policy.logprobs_of(rows, LogprobModel.REF if settings.has_reference else LogprobModel.POLICY)


def reference_of(way: str) -> str:
    kind = way.partition("_")[2]
    return f"fsdp_{kind}" if kind else "fsdp"


def first_moments(rank: PolicyRank) -> dict[str, Tensor]:
    """Adam's, full, by parameter: a mean of the gradients of all steps, divided and clipped. Collective."""
    backend: Any = rank._backend
    backend = getattr(backend, "_inner", backend)
    if rank._settings.deepspeed is None:
        return {name: full_copy(backend._optimizer.state[p]["exp_avg"]) for name, p in backend._trained.items()}
    from deepspeed.utils import safe_get_full_optimizer_state

    def moment(parameter: torch.nn.Parameter) -> Tensor:
        if rank._settings.deepspeed.zero_stage == 0:
            return backend._optimizer.state[parameter]["exp_avg"].clone()
        return safe_get_full_optimizer_state(parameter, "exp_avg").clone()

    return {name: moment(p) for name, p in backend._engine.module.named_parameters() if p.requires_grad}


def trained(rank: PolicyRank) -> dict[str, Tensor]:
    """What a publish of adapters alone sends, full. Collective."""
    return {name: tensor.clone() for name, tensor in rank._backend.iter_trained_params()}


async def on_two_ranks(make: Callable[[TrainingSettings], OneOfTwo], directory: Path) -> None:
    """Trains in every way, and leaves figures, gradients, weights, log-probs and a checkpoint."""
    for way in WAYS:
        settings = settings_of(way, directory)
        policy = make(settings)
        figures = await train(policy, first_step=0, num_steps=NUM_STEPS)
        moments = first_moments(policy.rank)
        await weights(policy, directory / way / "weights")
        published_alone = trained(policy.rank)
        if way == "fsdp_lora":
            await policy.export_hf(directory / way / "export")
        await policy.save(directory / way / "checkpoint")
        more = await train(policy, first_step=NUM_STEPS, num_steps=1)
        await policy.load(directory / way / "checkpoint")
        again = await train(policy, first_step=NUM_STEPS, num_steps=1)
        logprobs = await outputs(policy, settings)
        resharded = []
        for writer in (writer for writer, reader in OTHER_WAY.items() if reader == way):
            await policy.load(directory / f"{writer}_of_one" / "checkpoint")
            resharded = await train(policy, first_step=NUM_STEPS, num_steps=1)
            await weights(policy, directory / way / "resharded")
        if policy.index == 0:
            found = {
                "figures": figures,
                "more": more,
                "again": again,
                "resharded": resharded,
                "logprobs": [of_row.tolist() for of_row in logprobs.values],
            }
            (directory / way / "found.json").write_text(json.dumps(found))
            torch.save(moments, directory / way / "moments.pt")
            torch.save(published_alone, directory / way / "trained.pt")
        await policy.close()


@pytest.fixture(scope="module")
def two_ranks(rank_pair: RankPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_ranks")
    write_policy(directory / "policy")
    write_policy(directory / "tied_policy", is_tied=True)
    for way in OTHER_WAY:
        asyncio.run(on_one_rank(InProcessPolicy(settings_of(way, directory)), directory / f"{way}_of_one"))
    rank_pair.run(on_two_ranks, directory)
    return directory


async def on_one_rank(policy: InProcessPolicy, directory: Path) -> None:
    """Leaves a checkpoint, and what it goes on with."""
    await train(policy, first_step=0, num_steps=NUM_STEPS)
    await policy.save(directory / "checkpoint")
    more = await train(policy, first_step=NUM_STEPS, num_steps=1)
    await weights(policy, directory / "more")
    (directory / "more.json").write_text(json.dumps(more))
    await policy.close()


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[InProcessPolicy] = []

    def make_policy(settings: TrainingSettings) -> InProcessPolicy:
        made.append(InProcessPolicy(settings))
        return made[-1]

    yield make_policy
    for policy in made:
        asyncio.run(policy.close())


def assert_same_figures(here: list[dict[str, float]], there: list[dict[str, float]]) -> None:
    for a, b in zip(here, there, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)


Steps = tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Figures, first moments, weights, and what a publish of adapters alone would send."""


async def steps_of(policy: InProcessPolicy, directory: Path) -> Steps:
    figures = await train(policy, first_step=0, num_steps=NUM_STEPS)
    return figures, first_moments(policy._rank), await weights(policy, directory), trained(policy._rank)


@pytest.fixture(scope="module")
def references(two_ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Steps, RowLogprobs]]:
    """Of FSDP on one rank, with its outputs after one step more."""

    async def reference(way: str) -> tuple[Steps, RowLogprobs]:
        settings = settings_of(way, two_ranks)
        policy = InProcessPolicy(settings)
        steps = await steps_of(policy, tmp_path_factory.mktemp(way))
        await train(policy, first_step=NUM_STEPS, num_steps=1)
        found = steps, await outputs(policy, settings)
        await policy.close()
        return found

    return {way: asyncio.run(reference(way)) for way in dict.fromkeys(map(reference_of, WAYS))}


@pytest.mark.parametrize("way", WAYS)
async def test_one_rank_and_two_give_the_figures_gradients_weights_and_log_probs_of_fsdp_on_one(
    two_ranks: Path, references: dict[str, tuple[Steps, RowLogprobs]], make: Make, way: str, tmp_path: Path
) -> None:
    (figures, *tensors), logprobs = references[reference_of(way)]
    found = json.loads((two_ranks / way / "found.json").read_text())
    assert_same_figures(found["figures"], figures)
    update = load_file(two_ranks / way / "weights" / "v000000.safetensors")
    moments, published_alone = (torch.load(two_ranks / way / f"{name}.pt") for name in ("moments", "trained"))
    for here, there in zip((moments, update, published_alone), tensors, strict=True):
        assert_close(here, there, atol=ROUNDING)
    for here, there in zip(found["logprobs"], logprobs.values, strict=True):
        assert here == pytest.approx(there, abs=1e-5)

    if way != reference_of(way):
        of_alone, *alone = await steps_of(make(settings_of(way, two_ranks)), tmp_path)
        assert_same_figures(of_alone, figures)
        for here, there in zip(alone, tensors, strict=True):
            assert_close(here, there, atol=ROUNDING)


def test_two_ranks_export_merged_weights_and_the_adapters_that_they_publish(two_ranks: Path) -> None:
    way = two_ranks / "fsdp_lora"
    assert_close(load_file(way / "export" / "model.safetensors"), load_file(way / "weights" / "v000000.safetensors"))
    exported = load_file(way / "export" / "adapter" / "adapter_model.safetensors")
    assert_close(exported, torch.load(way / "trained.pt"))


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_go_on_from_their_checkpoint_to_the_last_bit(two_ranks: Path, way: str) -> None:
    found = json.loads((two_ranks / way / "found.json").read_text())
    assert found["again"] == found["more"]


@pytest.mark.parametrize("writer", OTHER_WAY)
def test_a_checkpoint_of_one_rank_goes_on_with_two_of_another_backend_or_stage(two_ranks: Path, writer: str) -> None:
    of_one, reader = two_ranks / f"{writer}_of_one", OTHER_WAY[writer]
    found = json.loads((two_ranks / reader / "found.json").read_text())["resharded"]
    assert_same_figures(found, json.loads((of_one / "more.json").read_text()))
    resharded, more = two_ranks / reader / "resharded", of_one / "more"
    here, there = (load_file(path / "v000000.safetensors") for path in (resharded, more))
    assert_close(here, there, atol=ROUNDING)


@pytest.mark.parametrize("writer", OTHER_WAY)
async def test_a_checkpoint_of_two_ranks_goes_on_with_one_of_another_backend_or_stage(
    two_ranks: Path, make: Make, writer: str, tmp_path: Path
) -> None:
    policy = make(replace(settings_of(OTHER_WAY[writer], two_ranks), seed=9))
    await policy.load(two_ranks / writer / "checkpoint")
    update = load_file(two_ranks / writer / "weights" / "v000000.safetensors")
    assert_close(await weights(policy, tmp_path / "weights"), update, atol=1e-7 if writer.endswith("lora") else 0.0)
    found = json.loads((two_ranks / writer / "found.json").read_text())
    assert_same_figures(await train(policy, first_step=NUM_STEPS, num_steps=1), found["more"])
