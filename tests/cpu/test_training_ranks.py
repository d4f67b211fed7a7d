"""Every way to train on two ranks over gloo, against FSDP2 on one rank in this process, in float32 on the same rows."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from skyrl_async.training.in_process import InProcessPolicy
from skyrl_async.training.settings import LoraSettings, TrainingSettings
from skyrl_async.types import LogprobModel
from tests.cpu.tiny_policies import assert_close, train, trajectories, weights, write_policy
from tests.cpu.two_ranks import OneOfTwo, run_two_ranks

pytestmark = pytest.mark.slow

NUM_STEPS = 3


def settings_of(directory: Path) -> dict[str, TrainingSettings]:
    """What is run, by name."""
    plain = TrainingSettings(policy_path=str(directory / "policy"), lr=1e-3, num_warmup_steps=2)
    adapters = replace(plain, lora=LoraSettings(rank=3, alpha=6.0), has_reference=True, kl_estimator="k3", kl_coef=0.1)
    return {"fsdp": plain, "lora": adapters}


async def on_two_ranks(make: Callable[[TrainingSettings], OneOfTwo], directory: Path) -> None:
    """Trains, and leaves figures, weights, log-probs and checkpoints."""
    for name, settings in settings_of(directory).items():
        policy = make(settings)
        figures = await train(policy, first_step=0, num_steps=NUM_STEPS)
        update = await weights(policy, directory / name / "weights")
        await policy.save(directory / name / "checkpoint")
        more = await train(policy, first_step=NUM_STEPS, num_steps=1)
        model = LogprobModel.REF if settings.has_reference else LogprobModel.POLICY
        logprobs = await policy.logprobs_of(trajectories(5, seed=3), model)
        if policy.index == 0:
            found = {"figures": figures, "more": more, "names": list(update), "logprobs": logprobs.values}
            (directory / name / "found.json").write_text(json.dumps(found))
        await policy.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_ranks")
    write_policy(directory / "policy")
    run_two_ranks(on_two_ranks, directory)
    return directory


@pytest.fixture
def make() -> Iterator[Callable[[TrainingSettings], InProcessPolicy]]:
    made: list[InProcessPolicy] = []

    def make_policy(settings: TrainingSettings) -> InProcessPolicy:
        made.append(InProcessPolicy(settings))
        return made[-1]

    yield make_policy
    for policy in made:
        asyncio.run(policy.close())


@pytest.mark.parametrize("name", ["fsdp", "lora"])
async def test_two_ranks_give_the_figures_weights_and_log_probs_of_one(
    two_ranks: Path, make: Callable[[TrainingSettings], InProcessPolicy], name: str, tmp_path: Path
) -> None:
    settings = settings_of(two_ranks)[name]
    found = json.loads((two_ranks / name / "found.json").read_text())
    policy = make(settings)
    figures = await train(policy, first_step=0, num_steps=NUM_STEPS)
    for here, there in zip(found["figures"], figures, strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-5)
    update = load_file(two_ranks / name / "weights" / "v000000.safetensors")
    assert_close(update, await weights(policy, tmp_path / "weights"), atol=1e-5)
    await train(policy, first_step=NUM_STEPS, num_steps=1)
    model = LogprobModel.REF if settings.has_reference else LogprobModel.POLICY
    logprobs = await policy.logprobs_of(trajectories(5, seed=3), model)
    for here, there in zip(found["logprobs"], logprobs.values, strict=True):
        assert here == pytest.approx(there, abs=1e-5)


@pytest.mark.parametrize("name", ["fsdp", "lora"])
async def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    two_ranks: Path, make: Callable[[TrainingSettings], InProcessPolicy], name: str, tmp_path: Path
) -> None:
    policy = make(replace(settings_of(two_ranks)[name], seed=9))
    await policy.load(two_ranks / name / "checkpoint")
    update = load_file(two_ranks / name / "weights" / "v000000.safetensors")
    assert_close(await weights(policy, tmp_path / "weights"), update, atol=0.0 if name == "fsdp" else 1e-7)
    figures = await train(policy, first_step=NUM_STEPS, num_steps=1)
    found = json.loads((two_ranks / name / "found.json").read_text())
    for here, there in zip(figures, found["more"], strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-5)
