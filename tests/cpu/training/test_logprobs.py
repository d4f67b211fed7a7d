"""Log-probs of rows under the policy and under a frozen reference, and training with them: one rank in this process."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_async.columns import Logprobs, at_last
from skyrl_async.errors import TrainingError
from skyrl_async.rollout.group_state import from_json, group_to_json
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory
from tests.cpu.tiny_policies import advantages, export_weights, gradients, num_tokens, weights, write_policy
from tests.cpu.tiny_policies import assert_close as assert_equal
from tests.cpu.tiny_policies import varied_trajectories as trajectories
from tests.cpu.training.test_fsdp_backend import make

__all__ = ["make"]
Make = Callable[..., InProcessPolicy]
POLICY, REF = LogprobModel.POLICY, LogprobModel.REF
TEMPERATURE = 0.7
KL = {"kl_estimator": "k3", "kl_coef": 0.3, "temperature": TEMPERATURE}


@pytest.fixture(scope="module")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def other_directory(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary."""
    directory = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(policy_directory)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def plain_logprobs(directory: Path, rows: Sequence[Trajectory]) -> list[Tensor]:
    """(T,) per row, of a plain transformers forward of each row alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for row in rows:
        ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
        logprobs = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
        predicting = logprobs[len(row.prompt_token_ids) - 1 : -1]
        found.append(predicting.gather(1, ids[0, len(row.prompt_token_ids) :, None])[:, 0])
    return found


def assert_close(here: Sequence[Sequence[float]], there: Sequence[Sequence[float]], *, tolerance: float) -> None:
    """Relative to the larger ones: float32 has seven digits."""
    assert [len(row) for row in here] == [len(row) for row in there]
    pairs = [pair for of_row in zip(here, there, strict=True) for pair in zip(*of_row, strict=True)]
    assert max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs) <= tolerance


def as_lists(found: RowLogprobs) -> tuple[int, list[list[float]]]:
    return found.version, [of_row.tolist() for of_row in found.values]


def with_refs(rows: Sequence[Trajectory], values: Sequence[Logprobs]) -> list[Trajectory]:
    return [replace(row, ref_logprobs=of_row) for row, of_row in zip(rows, values, strict=True)]


class TestLogprobs:
    async def test_they_are_those_of_a_plain_forward_at_the_sampling_temperature_and_zero_between_turns(
        self, make: Make, policy_directory: Path, other_directory: Path
    ) -> None:
        rows = trajectories(6, seed=1, is_multi_turn=True)
        policy = make(temperature=TEMPERATURE, has_reference=True, reference_path=str(other_directory))
        for model, directory in ((POLICY, policy_directory), (REF, other_directory)):
            found = await policy.logprobs_of(rows, model)
            masks = [torch.tensor(row.loss_mask) for row in rows]
            expected = [
                (of_row * mask).tolist() for of_row, mask in zip(plain_logprobs(directory, rows), masks, strict=True)
            ]
            assert_close(found.values, expected, tolerance=5e-6)
            assert found.version == 0
        assert next(of_row[2:4].tolist() for of_row in found.values if len(of_row) > 4) == [0.0, 0.0]

    @pytest.mark.parametrize("micro_batch_tokens", [1, 60, 100_000])
    async def test_micro_batches_and_company_change_them_by_less_than_1e_6(
        self, make: Make, micro_batch_tokens: int
    ) -> None:
        rows = trajectories(9, seed=3)
        reference = (await make().logprobs_of(rows, POLICY)).values
        policy = make(micro_batch_tokens=micro_batch_tokens)
        assert_close((await policy.logprobs_of(rows, POLICY)).values, reference, tolerance=1e-6)
        apart = [(await policy.logprobs_of([row], POLICY)).values[0] for row in reversed(rows)]
        assert_close(apart[::-1], reference, tolerance=1e-6)

    async def test_a_frozen_policy_of_equal_weights_says_what_the_one_that_trains_says_bit_for_bit(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows = trajectories(6, seed=1)
        policy, frozen = make(temperature=TEMPERATURE), make(temperature=TEMPERATURE, trains=False)
        before = as_lists(await frozen.logprobs_of(rows, POLICY))
        assert before == as_lists(await policy.logprobs_of(rows, POLICY))
        await policy.forward_backward(rows, advantages(6, seed=2), 0)
        await policy.step(num_tokens(rows))
        version, trained = as_lists(await policy.logprobs_of(rows, POLICY))
        assert version == 1 and before[1] != trained
        assert as_lists(await frozen.logprobs_of(rows, POLICY)) == before
        await frozen.load_weights(await export_weights(policy, 1, tmp_path / "v1", 8192))
        assert as_lists(await frozen.logprobs_of(rows, POLICY)) == (1, trained)

    async def test_they_leave_accumulated_gradients_and_what_follows_alone(self, make: Make, tmp_path: Path) -> None:
        rows, values = trajectories(6, seed=1), advantages(6, seed=2)
        asked, undisturbed = make(has_reference=True), make()
        for step in range(2):
            for policy in (asked, undisturbed):
                for start in (0, 3):
                    await policy.forward_backward(rows[start : start + 3], values[start : start + 3], step)
                    if policy is asked:
                        await policy.logprobs_of(rows, POLICY)
                        await policy.logprobs_of(rows, REF)
                await policy.step(num_tokens(rows))
        assert_equal(await weights(asked, tmp_path / "a"), await weights(undisturbed, tmp_path / "b"))

    async def test_the_version_counts_optimizer_steps_over_a_resumption(self, make: Make, tmp_path: Path) -> None:
        rows = trajectories(2, seed=1)
        policy = make()
        for step in range(3):
            await policy.forward_backward(rows, advantages(2, seed=2), step)
            await policy.step(num_tokens(rows))
        await policy.save(tmp_path / "checkpoint")
        resumed = make()
        await resumed.load(tmp_path / "checkpoint")
        assert (await resumed.logprobs_of(rows, POLICY)).version == 3

    async def test_rows_without_sampled_tokens_are_zero_and_need_no_forward(self, make: Make) -> None:
        silent = replace(trajectories(1, seed=1)[0], loss_mask=(0,) * 4, logprobs=(0.0,) * 4, versions=(-1,) * 4)
        assert as_lists(await make().logprobs_of([silent], POLICY)) == (0, [[0.0] * 4])
        assert (await make().logprobs_of([], POLICY)).values == ()


class TestFrozenWeights:
    async def test_a_version_that_cannot_be_read_or_is_of_another_model_changes_nothing(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows = trajectories(3, seed=1)
        frozen = make(trains=False)
        before = as_lists(await frozen.logprobs_of(rows, POLICY))
        update = await export_weights(make(), 4, tmp_path / "v4", 8192)
        other = InProcessPolicy(TrainingSettings(policy_path=str(write_policy(tmp_path / "other", hidden_size=64))))
        with pytest.raises(TrainingError, match=r"version 5 is of another model: model.embed_tokens.weight has shape"):
            await frozen.load_weights(await export_weights(other, 5, tmp_path / "v5", 1 << 30))
        await other.close()
        shutil.rmtree(tmp_path / "v4")
        with pytest.raises(TrainingError, match="the weights of version 4 cannot be read: .*v000004"):
            await frozen.load_weights(update)
        assert as_lists(await frozen.logprobs_of(rows, POLICY)) == before

    async def test_what_does_not_train_refuses_to_and_what_trains_takes_no_weights(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows = trajectories(2, seed=1)
        frozen, policy = make(trains=False), make()
        with pytest.raises(TrainingError, match="does not train cannot take gradients"):
            await frozen.forward_backward(rows, [1.0, -1.0], 0)
        with pytest.raises(TrainingError, match="does not train cannot step"):
            await frozen.step(1.0)
        with pytest.raises(TrainingError, match="workers that train take no weights from elsewhere"):
            await policy.load_weights(await export_weights(policy, 1, tmp_path, 1 << 30))
        with pytest.raises(TrainingError, match="hold no reference model"):
            await policy.logprobs_of(rows, REF)


@pytest.mark.slow
class TestDivergenceInTheLoss:
    async def test_gradients_are_those_of_a_plain_transformers_forward(
        self, make: Make, policy_directory: Path, other_directory: Path
    ) -> None:
        rows, values = trajectories(5, seed=1, is_multi_turn=True), advantages(5, seed=2)
        rows[1] = replace(rows[1], weight=0.25)
        for index in (1, 2):
            of_tokens = np.linspace(0.0, 3.0, len(rows[index].loss_mask), dtype=np.float32)
            rows[index] = replace(rows[index], token_weights=of_tokens)
        policy = make(policy_loss="rollout_is", has_reference=True, reference_path=str(other_directory), **KL)
        figures = await policy.forward_backward(rows, values, 0)

        model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
        total, divergence = torch.zeros(()), 0.0
        refs = [of_row.detach() for of_row in plain_logprobs(other_directory, rows)]
        for row, advantage, ref in zip(rows, values, refs, strict=True):
            ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
            logprobs = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)[len(row.prompt_token_ids) - 1 : -1]
            chosen = logprobs.gather(1, ids[0, len(row.prompt_token_ids) :, None])[:, 0]
            ratio = (chosen - torch.tensor(row.logprobs)).exp().detach().clamp(max=2.0)
            kl = ((ref - chosen).exp() - 1 - (ref - chosen)).clamp(max=10.0)  # random models are far apart
            mask = torch.tensor(row.loss_mask)
            of_tokens = torch.ones(len(mask)) if row.token_weights is None else torch.tensor(row.token_weights)
            total = total + row.weight * (of_tokens * mask * (KL["kl_coef"] * kl - ratio * advantage * chosen)).sum()
            divergence += (mask * kl).sum().item()
        total.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_equal(gradients(policy), expected, atol=1e-6 * max(scale, 1.0))
        assert figures["ref_kl_sum"] == pytest.approx(divergence, rel=1e-5)

    @pytest.mark.parametrize("placement", ["streamed", "small micro-batches", "values that came with the rows"])
    async def test_losses_and_gradients_are_the_same_to_1e_6_wherever_the_reference_runs(
        self, make: Make, other_directory: Path, placement: str
    ) -> None:
        rows, values = trajectories(8, seed=1), advantages(8, seed=2)
        held = {"has_reference": True, "reference_path": str(other_directory)}
        inline = make(**KL, **held)
        whole = await inline.forward_backward(rows, values, 0)
        policy, parts = make(**KL, **held), [slice(0, 8)]
        if placement == "streamed":
            parts = [slice(start, start + 2) for start in (0, 2, 4, 6)]
        elif placement == "small micro-batches":
            policy = make(**KL, **held, micro_batch_tokens=60)
        else:
            elsewhere = make(trains=False, temperature=TEMPERATURE, policy_path=str(other_directory))
            policy = make(**KL)
            rows = with_refs(rows, (await elsewhere.logprobs_of(rows, POLICY)).values)
        found = [await policy.forward_backward(rows[part], values[part], 0) for part in parts]
        for name in ("ref_kl_sum", "loss_sum"):
            assert sum(figures[name] for figures in found) == pytest.approx(whole[name], rel=1e-6)
        expected = gradients(inline)
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_equal(gradients(policy), expected, atol=1e-6 * max(scale, 1.0))

    async def test_the_reference_stays_where_the_policy_began_and_holds_it_back(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(6, seed=1), advantages(6, seed=2)
        held, free = (
            make(has_reference=True, **{**KL, "kl_coef": 5.0}),
            make(has_reference=True, **{**KL, "kl_coef": 0.0}),
        )
        before = as_lists(await held.logprobs_of(rows, REF))
        assert before == as_lists(await held.logprobs_of(rows, POLICY))
        divergences = {}
        for policy in (held, free):
            for step in range(5):
                figures = await policy.forward_backward(rows, values, step)
                assert step > 0 or figures["ref_kl_sum"] == 0.0
                await policy.step(num_tokens(rows))
            divergences[policy] = figures["ref_kl_sum"]
        assert 0 < divergences[held] < 0.7 * divergences[free]
        assert as_lists(await held.logprobs_of(rows, REF)) == before
        assert as_lists(await held.logprobs_of(rows, POLICY)) != before

    async def test_a_group_without_advantage_is_still_pulled_back(self, make: Make, other_directory: Path) -> None:
        rows = trajectories(3, seed=1)
        policy = make(**KL, has_reference=True, reference_path=str(other_directory))
        await policy.forward_backward(rows, [0.0] * 3, 0)
        assert (await policy.step(num_tokens(rows)))["grad_norm"] > 0

    async def test_rows_without_reference_log_probs_are_refused_where_no_reference_is(self, make: Make) -> None:
        with pytest.raises(TrainingError, match="use_kl_loss needs trajectories with ref_logprobs, or policy workers"):
            await make(**KL).forward_backward(trajectories(2, seed=1), [1.0, -1.0], 0)


class TestDecoupledPpo:
    async def test_recomputed_at_the_version_that_is_trained_its_gradient_is_that_of_rollout_is(
        self, make: Make
    ) -> None:
        rows, values = trajectories(5, seed=1), advantages(5, seed=2)
        policy, reference = make(policy_loss="decoupled_ppo"), make(policy_loss="rollout_is")
        old = (await policy.logprobs_of(rows, POLICY)).values
        recomputed = [replace(row, old_logprobs=o, old_version=0) for row, o in zip(rows, old, strict=True)]
        await policy.forward_backward(recomputed, values, 0)
        await reference.forward_backward(rows, values, 0)
        expected = gradients(reference)
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_equal(gradients(policy), expected, atol=2e-6 * max(scale, 1.0))

    async def test_rows_that_were_not_recomputed_are_refused(self, make: Make) -> None:
        with pytest.raises(TrainingError, match="policy_loss_type=decoupled_ppo needs trajectories with old_logprobs"):
            await make(policy_loss="decoupled_ppo").forward_backward(trajectories(2, seed=1), [1.0, -1.0], 0)


def test_a_checkpoint_keeps_recomputed_log_probs_and_rewards_of_tokens_and_leaves_the_reference_s_to_the_run_that_resumes() -> (
    None
):
    row = trajectories(1, seed=1)[0]
    rewards = at_last(row.reward, len(row.response_token_ids))
    full = replace(row, ref_logprobs=row.logprobs, old_logprobs=row.logprobs, old_version=3, token_rewards=rewards)
    group = Group(uid="a", admission_index=1, scheduled_version=2, trajectories=(full, row))
    assert from_json(Group, group_to_json(group)).trajectories == (replace(full, ref_logprobs=None), row)
