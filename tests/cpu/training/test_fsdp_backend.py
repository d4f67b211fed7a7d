"""One rank on FSDP2 in this process: gradients, steps, exports and checkpoints of a tiny random Qwen3."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_async.algorithms.settings import CorrectionSettings
from skyrl_async.errors import CheckpointError, ConfigError, PolicyError, TrainingError
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.sharded import lr_factor
from skyrl_async.training.export.hf_export import export_hf_directory
from skyrl_async.training.workers.in_process import InProcessPolicy
from tests.cpu import tiny_policies
from tests.cpu.tiny_policies import (
    advantages,
    assert_close,
    export_weights,
    full_copy,
    gradients,
    num_tokens,
    weights,
    write_tokenizer,
)
from tests.cpu.tiny_policies import varied_trajectories as trajectories

Make = Callable[..., InProcessPolicy]


def write_policy(directory: Path, *, is_tied: bool = False, hidden_size: int = 32) -> Path:
    """With a tokenizer, and with dropout, which training must not draw."""
    tiny_policies.write_policy(directory, is_tied=is_tied, hidden_size=hidden_size, attention_dropout=0.5)
    write_tokenizer(directory)
    return directory


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def adam_state(policy: InProcessPolicy) -> dict[str, torch.Tensor]:
    """Moments and step numbers of the optimizer, full, by parameter."""
    backend: Any = policy._rank._backend
    return {
        f"{name}.{kind}": full_copy(tensor)
        for name, parameter in backend._trained.items()
        for kind, tensor in backend._optimizer.state[parameter].items()
    }


@pytest.fixture(scope="module")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make(policy_directory: Path) -> Iterator[Make]:
    """Makes policies on ``policy_directory`` that leave the process group afterwards."""
    made: list[InProcessPolicy] = []

    def make_policy(**changes: Any) -> InProcessPolicy:
        settings = replace(TrainingSettings(policy_path=str(policy_directory), lr=1e-2), **changes)
        made.append(InProcessPolicy(settings))
        return made[-1]

    yield make_policy
    for policy in made:
        if not policy._is_closed:
            policy._rank.close()


class TestGradients:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("loss", ["ppo_clip", "rollout_is"])
    async def test_they_are_those_of_the_summed_loss_of_a_plain_transformers_forward(
        self, make: Make, policy_directory: Path, loss: str, temperature: float
    ) -> None:
        rows, values = trajectories(5, seed=1, is_multi_turn=True), advantages(5, seed=2)
        policy = make(policy_loss=loss, temperature=temperature)
        figures = await policy.forward_backward(rows, values, 3)

        model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
        total = torch.zeros(())
        for row, advantage in zip(rows, values, strict=True):
            ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
            logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
            for offset, (token, mu, mask) in enumerate(
                zip(row.response_token_ids.tolist(), row.logprobs.tolist(), row.loss_mask.tolist(), strict=True)
            ):
                logprob = logprobs[len(row.prompt_token_ids) + offset - 1, token]
                ratio = (logprob - mu).exp()
                if loss == "ppo_clip":
                    total = total - mask * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                else:
                    total = total - mask * ratio.detach().clamp(max=2.0) * advantage * logprob
        total.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_close(gradients(policy), expected, atol=1e-6 * max(scale, 1.0))
        assert figures["loss_sum"] == pytest.approx(total.item(), rel=1e-5)
        assert figures["num_tokens"] == num_tokens(rows)
        assert figures["token_lag_max"] == 3

    @pytest.mark.parametrize("micro_batch_tokens", [60, 4096])
    async def test_an_entropy_bonus_is_that_of_the_distributions_a_plain_transformers_forward_samples_from(
        self, make: Make, policy_directory: Path, micro_batch_tokens: int
    ) -> None:
        rows = [replace(row, weight=0.5) for row in trajectories(5, seed=1, is_multi_turn=True)]
        policy = make(entropy_coef=0.1, temperature=0.7, logprobs_chunk_size=8, micro_batch_tokens=micro_batch_tokens)
        figures = await policy.forward_backward(rows, [0.0] * 5, 0)

        model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
        total = torch.zeros(())
        for row in rows:
            logits = (
                model(torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])).logits[0] / 0.7
            )
            entropies = torch.distributions.Categorical(logits=logits[len(row.prompt_token_ids) - 1 : -1]).entropy()
            total = total + (entropies * torch.tensor(row.loss_mask)).sum()
        (-0.1 * 0.5 * total).backward()
        assert_close(gradients(policy), {name: p.grad for name, p in model.named_parameters()}, atol=1e-6)
        assert figures["entropy_sum"] == pytest.approx(total.item(), rel=1e-6)

    @pytest.mark.parametrize(
        "correction",
        [CorrectionSettings(), CorrectionSettings(token_tis=5.0, geometric_mask=(0.2, 1.5), m2_threshold=0.3)],
        ids=["uncorrected", "corrected"],
    )
    async def test_streamed_groups_give_the_unstreamed_step_to_1e_6(
        self, make: Make, correction: CorrectionSettings
    ) -> None:
        rows, values = trajectories(8, seed=1), advantages(8, seed=2)
        streamed, whole = (make(policy_loss="rollout_is", correction=correction) for _ in range(2))
        await whole.forward_backward(rows, values, 0)
        for start in (0, 2, 4, 6):
            await streamed.forward_backward(rows[start : start + 2], values[start : start + 2], 0)
        expected = gradients(whole)
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_close(gradients(streamed), expected, atol=1e-6 * max(scale, 1.0))

    async def test_groups_in_the_same_order_give_the_same_bits_whatever_happens_between(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(8, seed=1), advantages(8, seed=2)
        at_once, with_pauses = make(), make()
        for step in range(3):
            for policy in (at_once, with_pauses):
                for start in (0, 4):
                    await policy.forward_backward(rows[start : start + 4], values[start : start + 4], step)
                    if policy is with_pauses:
                        await policy.logprobs(list(range(10)))
                        await export_weights(policy, 9, tmp_path / "between", 1 << 30)
                await policy.step(num_tokens(rows))
        assert_close(await weights(at_once, tmp_path / "a"), await weights(with_pauses, tmp_path / "b"))

    @pytest.mark.parametrize("micro_batch_tokens", [1, 60, 100_000])
    async def test_the_size_of_micro_batches_does_not_change_them(self, make: Make, micro_batch_tokens: int) -> None:
        rows, values = trajectories(7, seed=3), advantages(7, seed=4)
        policy, reference = make(micro_batch_tokens=micro_batch_tokens), make()
        figures = await policy.forward_backward(rows, values, 1)
        assert figures == pytest.approx(await reference.forward_backward(rows, values, 1), rel=1e-5)
        expected = gradients(reference)
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_close(gradients(policy), expected, atol=1e-6 * max(scale, 1.0))

    @pytest.mark.parametrize("micro_batch_tokens", [60, 4096])
    async def test_padding_the_rows_instead_of_packing_them_does_not_change_them(
        self, make: Make, micro_batch_tokens: int
    ) -> None:
        rows, values = trajectories(7, seed=3, is_multi_turn=True), advantages(7, seed=4)
        packed = make(micro_batch_tokens=micro_batch_tokens)
        padded = make(micro_batch_tokens=micro_batch_tokens, use_sample_packing=False)
        figures = await packed.forward_backward(rows, values, 1)
        assert figures == pytest.approx(await padded.forward_backward(rows, values, 1), rel=1e-5)
        expected = gradients(padded)
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert_close(gradients(packed), expected, atol=1e-6 * max(scale, 1.0))

    async def test_recomputing_activations_does_not_change_them(self, make: Make) -> None:
        rows, values = trajectories(4, seed=3), advantages(4, seed=4)
        policy, reference = make(activation_checkpointing=True), make()
        for each in (policy, reference):
            await each.forward_backward(rows, values, 0)
        assert_close(gradients(policy), gradients(reference), atol=1e-6)

    async def test_mixed_precision_comes_close_and_keeps_float32_weights(self, make: Make, tmp_path: Path) -> None:
        rows, values = trajectories(4, seed=3), advantages(4, seed=4)
        policy, reference = make(mixed_precision=True), make()
        for each in (policy, reference):
            await each.forward_backward(rows, values, 0)
        here, there = gradients(policy), gradients(reference)
        flat_here = torch.cat([g.flatten() for g in here.values()])
        flat_there = torch.cat([g.flatten() for g in there.values()])
        assert torch.cosine_similarity(flat_here, flat_there, dim=0) > 0.98
        assert {g.dtype for g in here.values()} == {torch.float32}

    async def test_a_group_without_advantage_adds_nothing_but_its_figures(self, make: Make, tmp_path: Path) -> None:
        rows, values = trajectories(8, seed=1), advantages(4, seed=2)
        policy, reference = make(), make()
        await reference.forward_backward(rows[:4], values, 0)
        await policy.forward_backward(rows[:4], values, 0)
        figures = await policy.forward_backward(rows[4:], [0.0] * 4, 0)
        assert_close(gradients(policy), gradients(reference))
        assert figures["num_tokens"] == num_tokens(rows[4:])
        assert figures["entropy_sum"] > 0

    async def test_rows_without_sampled_tokens_count_nothing(self, make: Make) -> None:
        silent = replace(trajectories(1, seed=1)[0], loss_mask=(0,) * 4, logprobs=(0.0,) * 4, versions=(-1,) * 4)
        policy = make()
        assert await policy.forward_backward([silent], [1.0], 0) == {"num_tokens": 0.0}
        with pytest.raises(
            TrainingError, match="denominator > 0, got 0: .* answers are empty, or all of them were abandoned"
        ):
            await policy.step(0)

    async def test_advantages_that_do_not_match_the_rows_are_refused(self, make: Make) -> None:
        with pytest.raises(ValueError, match="one value per trajectory .2., got 1"):
            await make().forward_backward(trajectories(2, seed=1), [1.0], 0)


class TestSteps:
    async def test_the_norm_is_that_of_the_token_mean_and_clipping_bounds_the_update(self, make: Make) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy = make()
        await policy.forward_backward(rows, values, 0)
        total = torch.cat([g.flatten() for g in gradients(policy).values()])
        stats = await policy.step(num_tokens(rows))
        assert stats["grad_norm"] == pytest.approx((total.norm() / num_tokens(rows)).item(), rel=1e-5)
        assert stats["lr"] == 1e-2
        assert gradients(policy) == {}

    async def test_a_gradient_that_is_not_finite_stops_changes_nothing_and_leaves_its_rows(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1, is_multi_turn=True), advantages(4, seed=2)
        policy = make(policy_loss="rollout_is", bad_step_dir=str(tmp_path / "bad_step"))
        await policy.forward_backward(rows[:1], values[:1], 3)
        await policy.step(num_tokens(rows[:1]))
        before = await weights(policy, tmp_path / "before")
        await policy.forward_backward(rows[1:3], [1e37, values[2]], 4)  # its square is past float32
        await policy.forward_backward(rows[3:], values[3:], 4)
        path = tmp_path / "bad_step" / "version_000004_rank_0.jsonl"
        with pytest.raises(
            TrainingError, match=rf"norm is inf over \d+ tokens at learning rate 0.01; .*, are in {path}$"
        ):
            await policy.step(num_tokens(rows))
        assert_close(await weights(policy, tmp_path / "after"), before)
        saved = {tuple(row["response_token_ids"]): row for row in map(json.loads, path.read_text().splitlines())}
        expected = zip(rows[1:], [1e37, *values[2:]], strict=True)
        assert {ids: row["advantages"][0] for ids, row in saved.items()} == {
            tuple(row.response_token_ids.tolist()): pytest.approx(value, rel=1e-6) for row, value in expected
        }
        for row in rows[1:]:
            found = saved[tuple(row.response_token_ids.tolist())]
            expected = await policy.logprobs(np.concatenate([row.prompt_token_ids, row.response_token_ids]))
            for offset, (value, is_sampled) in enumerate(zip(found["policy_logprobs"], row.loss_mask, strict=True)):
                at = len(row.prompt_token_ids) + offset - 1
                assert value == (pytest.approx(expected[at], abs=1e-5) if is_sampled else None)
            assert found["behavior_logprobs"] == row.logprobs.tolist() and found["loss_mask"] == row.loss_mask.tolist()
        await policy.forward_backward(rows, values, 5)
        assert (await policy.step(num_tokens(rows)))["grad_norm"] > 0

    async def test_a_loss_that_is_not_finite_stops_at_once_and_leaves_its_rows(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy = make(bad_step_dir=str(tmp_path))
        path = tmp_path / "version_000007_rank_0.jsonl"
        with pytest.raises(
            TrainingError, match=rf"loss of 4 rows at version 7 is nan on rank 0. The step's rows, .*, are in {path}$"
        ):
            await policy.forward_backward(rows, [float("nan"), *values[1:]], 7)
        assert sorted(
            map(math.isnan, (json.loads(line)["advantages"][0] for line in path.read_text().splitlines()))
        ) == ([False] * 3 + [True])
        with pytest.raises(TrainingError, match="norm is nan .*Nothing was applied"):
            await policy.step(num_tokens(rows))

    async def test_a_mini_batch_without_any_advantage_steps_as_one_of_zero_gradients(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy = make()
        await policy.forward_backward(rows, values, 0)
        await policy.step(num_tokens(rows))
        before = await weights(policy, tmp_path / "before")
        await policy.forward_backward(rows, [0.0] * 4, 1)
        assert (await policy.step(num_tokens(rows)))["grad_norm"] == 0.0
        after = await weights(policy, tmp_path / "after")
        assert any(not torch.equal(before[name], after[name]) for name in before)

    async def test_a_scaled_step_moves_weights_by_its_share_and_the_moments_as_a_whole_one(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        moved, moments = {}, {}
        for scale in (1.0, 0.5):
            policy = make()
            before = await weights(policy, tmp_path / f"{scale}_before")
            await policy.forward_backward(rows, values, 0)
            assert (await policy.step(num_tokens(rows), scale))["grad_norm"] > 0
            after = await weights(policy, tmp_path / f"{scale}_after")
            moved[scale] = {name: after[name] - before[name] for name in before}
            moments[scale] = adam_state(policy)
        assert all(update.abs().max() > 1e-3 for update in moved[1.0].values())
        assert_close(moved[0.5], {name: 0.5 * update for name, update in moved[1.0].items()}, atol=1e-6)
        assert_close(moments[0.5], moments[1.0])

    async def test_a_refused_step_leaves_weights_and_moments_drops_its_gradients_and_counts(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy = make(num_warmup_steps=4)
        await policy.forward_backward(rows, values, 0)
        await policy.step(num_tokens(rows))
        before, moments = await weights(policy, tmp_path / "before"), adam_state(policy)
        await policy.forward_backward(rows, values, 1)
        stats = await policy.step(num_tokens(rows), 0.0)
        assert stats["grad_norm"] == 0.0 and gradients(policy) == {}
        assert_close(await weights(policy, tmp_path / "after"), before)
        assert_close(adam_state(policy), moments)
        await policy.forward_backward(rows, values, 2)
        assert (await policy.step(num_tokens(rows)))["lr"] == pytest.approx(0.75e-2), "its step of the warm-up is over"

    async def test_steps_that_the_end_of_the_data_had_no_groups_for_count_for_the_learning_rate(
        self, make: Make
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy = make(num_warmup_steps=4)
        await policy.forward_backward(rows, values, 2)
        assert (await policy.step(num_tokens(rows)))["lr"] == pytest.approx(0.75e-2), "version 2's"

    async def test_log_probs_follow_every_step_also_after_forwards_without_backward(
        self, make: Make, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy = make(temperature=0.5)
        ids = list(range(3, 20))
        for step in range(3):
            await policy.forward_backward(rows, values, step)
            await policy.logprobs(ids)
            await policy.step(num_tokens(rows))
            directory = tmp_path / f"step{step}"
            await policy.export_hf(directory)
            model = AutoModelForCausalLM.from_pretrained(directory).eval()
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            assert await policy.logprobs(ids) == pytest.approx(expected.tolist(), abs=1e-5)
        assert await policy.logprobs([5]) == []

    @pytest.mark.parametrize(
        ("schedule", "expected"),
        [
            ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
            ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
            ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ],
    )
    def test_learning_rates_warm_up_and_follow_their_schedule(self, schedule: str, expected: list[float]) -> None:
        settings = TrainingSettings(policy_path="x", lr_schedule=schedule, num_warmup_steps=2, num_steps=6)
        found = [lr_factor(step, settings) for step in range(7)]
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
class TestExports:
    async def test_an_update_holds_every_weight_under_its_name_in_the_dtype_that_is_served(
        self, make: Make, policy_directory: Path, tmp_path: Path
    ) -> None:
        policy = make(serve_dtype="bfloat16")
        update = await export_weights(policy, 7, tmp_path, 100)
        source = load_file(policy_directory / "model.safetensors")
        assert file_names(tmp_path) == ["v000007.safetensors"]
        found = load_file(tmp_path / "v000007.safetensors")
        assert update.path == str(tmp_path / "v000007.safetensors")
        assert_close(found, {name: tensor.bfloat16() for name, tensor in source.items()})
        assert update.manifest == {name: ("bfloat16", tuple(tensor.shape)) for name, tensor in source.items()}
        assert update.num_bytes == sum(tensor.nbytes for tensor in found.values())

    async def test_what_was_gathered_is_sent_whatever_is_trained_meanwhile(self, make: Make, tmp_path: Path) -> None:
        policy = make()
        before = await weights(policy, tmp_path / "before")
        await policy.gather_weights(1)
        rows = trajectories(4, seed=1)
        await policy.forward_backward(rows, advantages(4, seed=2), 1)
        await policy.step(num_tokens(rows))
        update = await policy.send_weights(1, tmp_path / "sent", 1 << 30)
        assert_close(load_file(update.path), before)

    async def test_persistent_buffers_are_exported_with_their_dtype(self, make: Make, tmp_path: Path) -> None:
        policy = make(serve_dtype="bfloat16")
        inner = policy._rank._backend._model.model
        inner.register_buffer("counts", torch.arange(5))
        inner.register_buffer("scratch", torch.zeros(2), persistent=False)
        update = await export_weights(policy, 1, tmp_path / "sent", 1 << 30)
        assert update.manifest["model.counts"] == ("int64", (5,)) and "model.scratch" not in update.manifest
        await policy.export_hf(tmp_path / "hf")
        exported = load_file(tmp_path / "hf" / "model.safetensors")
        assert torch.equal(exported["model.counts"], torch.arange(5))

    async def test_tied_weights_are_written_once(self, tmp_path: Path) -> None:
        policy = InProcessPolicy(TrainingSettings(policy_path=str(write_policy(tmp_path / "tied", is_tied=True))))
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        await policy.forward_backward(rows, values, 0)
        await policy.step(num_tokens(rows))
        update = await export_weights(policy, 1, tmp_path / "out", 1 << 30)
        assert "model.embed_tokens.weight" in update.manifest
        assert "lm_head.weight" not in update.manifest
        await policy.export_hf(tmp_path / "hf")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        await policy.close()
        await policy.close()

    async def test_weights_that_cannot_be_written_are_an_error_that_names_the_file(
        self, make: Make, tmp_path: Path
    ) -> None:
        (tmp_path / "v000001.safetensors").mkdir()
        with pytest.raises(TrainingError, match=r"cannot write \d+ bytes of weights to .*v000001"):
            await export_weights(make(), 1, tmp_path, 1 << 30)
        assert file_names(tmp_path) == ["v000001.safetensors"]

    async def test_an_export_is_a_hugging_face_directory_with_the_tokenizer(
        self, make: Make, policy_directory: Path, tmp_path: Path
    ) -> None:
        policy = make(serve_dtype="bfloat16")
        await policy.export_hf(tmp_path / "hf")
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
        source = load_file(policy_directory / "model.safetensors")
        assert_close(dict(model.state_dict()), {name: tensor.bfloat16() for name, tensor in source.items()})
        assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode("w3 w5") == [3, 5]

    def test_an_export_in_several_files_loads_through_its_index(self, policy_directory: Path, tmp_path: Path) -> None:
        source = load_file(policy_directory / "model.safetensors")
        export_hf_directory(
            source.items(), source=policy_directory, directory=tmp_path, dtype=torch.float32, shard_bytes=20_000
        )
        assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
        assert_close(dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()), source)


@pytest.mark.slow
class TestCheckpoints:
    async def train(self, policy: InProcessPolicy, *, first_step: int, num_steps: int) -> list[dict[str, float]]:
        stats = []
        for step in range(first_step, first_step + num_steps):
            rows, values = trajectories(4, seed=step), advantages(4, seed=step)
            await policy.forward_backward(rows, values, step)
            stats.append(await policy.step(num_tokens(rows)))
        return stats

    async def test_a_restored_policy_continues_bit_for_bit(self, make: Make, tmp_path: Path) -> None:
        changes = {"lr_schedule": "cosine", "num_steps": 6, "num_warmup_steps": 2, "weight_decay": 0.1}
        policy, restored = make(**changes), make(**changes)
        await self.train(policy, first_step=0, num_steps=3)
        await policy.save(tmp_path / "checkpoint")
        drawn = torch.rand(3)
        stats = await self.train(policy, first_step=3, num_steps=2)
        await restored.load(tmp_path / "checkpoint")
        assert torch.equal(torch.rand(3), drawn)
        assert await self.train(restored, first_step=3, num_steps=2) == stats
        assert_close(await weights(policy, tmp_path / "a"), await weights(restored, tmp_path / "b"))

    async def test_a_tied_head_is_saved_once_and_read_from_a_checkpoint_that_holds_it_twice(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An older version wrote it under both names."""
        path = str(write_policy(tmp_path / "tied", is_tied=True))
        policy = make(policy_path=path)
        await self.train(policy, first_step=0, num_steps=1)
        await policy.save(tmp_path / "once")
        names = FileSystemReader(tmp_path / "once" / "state").read_metadata().state_dict_metadata
        assert "model.model.embed_tokens.weight" in names and "model.lm_head.weight" not in names
        backend: Any = policy._rank._backend
        state = backend._state()
        state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"]
        monkeypatch.setattr(backend, "_state", lambda: state)
        await policy.save(tmp_path / "twice")
        stats = await self.train(policy, first_step=1, num_steps=1)
        for name in ("once", "twice"):
            restored = make(policy_path=path, seed=3)
            await restored.load(tmp_path / name)
            assert await self.train(restored, first_step=1, num_steps=1) == stats

    async def test_saving_before_the_first_step_changes_nothing(self, make: Make, tmp_path: Path) -> None:
        policy, reference = make(), make()
        await policy.save(tmp_path / "checkpoint")
        for each in (policy, reference):
            await self.train(each, first_step=0, num_steps=2)
        assert_close(await weights(policy, tmp_path / "a"), await weights(reference, tmp_path / "b"))

    async def test_a_resumed_run_takes_the_learning_rate_it_is_started_with(self, make: Make, tmp_path: Path) -> None:
        policy, resumed = make(lr=1e-2, num_warmup_steps=4), make(lr=4e-3, num_warmup_steps=4)
        await self.train(policy, first_step=0, num_steps=2)
        await policy.save(tmp_path / "checkpoint")
        await resumed.load(tmp_path / "checkpoint")
        (stats,) = await self.train(resumed, first_step=2, num_steps=1)
        assert stats["lr"] == pytest.approx(3e-3)

    @pytest.mark.parametrize("missing", ["policy.json", "scheduler.pt", "rng_0.pt", "state/.metadata"])
    async def test_a_missing_file_is_named(self, make: Make, tmp_path: Path, missing: str) -> None:
        policy = make()
        await policy.save(tmp_path)
        (tmp_path / missing).unlink()
        with pytest.raises(CheckpointError, match=missing):
            await policy.load(tmp_path)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
    @pytest.mark.parametrize("name", ["state/__0_0.distcp", "scheduler.pt", "rng_0.pt", "policy.json"])
    async def test_a_full_disk_is_a_checkpoint_error_and_training_goes_on(
        self, make: Make, tmp_path: Path, name: str
    ) -> None:
        policy, reference = make(), make()
        (tmp_path / "full" / name).parent.mkdir(parents=True)
        (tmp_path / "full" / name).symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match="rank 0: .*No space left on device"):
            await policy.save(tmp_path / "full")
        await policy.save(tmp_path / "whole")
        for each in (policy, reference):
            await self.train(each, first_step=0, num_steps=1)
        assert_close(await weights(policy, tmp_path / "a"), await weights(reference, tmp_path / "b"))

    async def test_a_truncated_file_is_named(self, make: Make, tmp_path: Path) -> None:
        policy = make()
        await policy.save(tmp_path)
        file = tmp_path / "state" / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=rf"{file.name} has \d+ bytes instead of \d+"):
            await policy.load(tmp_path)

    async def test_a_damaged_file_of_the_right_size_is_an_error(self, make: Make, tmp_path: Path) -> None:
        policy = make()
        await policy.save(tmp_path)
        size = (tmp_path / "scheduler.pt").stat().st_size
        (tmp_path / "scheduler.pt").write_bytes(b"x" * size)
        with pytest.raises(CheckpointError, match="cannot be read"):
            await policy.load(tmp_path)

    async def test_a_checkpoint_of_another_model_is_refused_with_the_difference(
        self, make: Make, tmp_path: Path
    ) -> None:
        other = InProcessPolicy(TrainingSettings(policy_path=str(write_policy(tmp_path / "other", hidden_size=64))))
        await other.save(tmp_path / "checkpoint")
        await other.close()
        with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \(48, 64\) there and \(48, 32\)"):
            await make().load(tmp_path / "checkpoint")
        manifest = json.loads((tmp_path / "checkpoint" / "policy.json").read_text())
        manifest["model_type"] = "llama"
        (tmp_path / "checkpoint" / "policy.json").write_text(json.dumps(manifest))
        llama = "is of a llama model, that of {} is qwen3; set {} to the model it was made with"
        for key, is_critic in (("policy.path", False), ("trainer.critic.model.path", True)):
            with pytest.raises(CheckpointError, match=llama.format(key, key)):
                await make(is_critic=is_critic).load(tmp_path / "checkpoint")
        for content in ([], manifest | {"files": 1}):
            (tmp_path / "checkpoint" / "policy.json").write_text(json.dumps(content))
            with pytest.raises(CheckpointError, match=r"policy.json is damaged"):
                await make().load(tmp_path / "checkpoint")


class TestPolicyDirectory:
    def test_a_directory_that_is_no_policy_is_named(self, make: Make, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match=r"has no config.json"):
            make(policy_path=str(tmp_path / "nowhere"))

    def test_a_directory_without_weights_is_named(self, make: Make, policy_directory: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((policy_directory / "config.json").read_text())
        with pytest.raises(PolicyError, match="cannot be loaded by transformers"):
            make(policy_path=str(tmp_path))

    def test_missing_parameters_are_named_instead_of_drawn_at_random(
        self, make: Make, policy_directory: Path, tmp_path: Path
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(policy_directory)
        state = copy.copy(model.state_dict())
        del state["model.layers.1.mlp.up_proj.weight"]
        model.save_pretrained(tmp_path, state_dict=state)
        with pytest.raises(PolicyError, match=r"lacks 1 parameters .* such as model.layers.1.mlp.up_proj.weight"):
            make(policy_path=str(tmp_path))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
    def test_cuda_on_a_machine_without_it_is_refused(self, make: Make) -> None:
        with pytest.raises(ConfigError, match=r"set training.device=cpu"):
            make(device="cuda")
