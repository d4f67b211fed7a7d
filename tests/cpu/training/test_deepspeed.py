"""DeepSpeed's ZeRO on one rank in this process, with its config keys and JSON files."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_async.composition.logprobs import training_settings
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.deepspeed import read_user_config
from skyrl_async.config.schema.training import DeepSpeedConfig
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.training.backends.deepspeed import engine_config
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import LogprobModel
from tests.cpu.tiny_policies import advantages, assert_close, num_tokens, train, trajectories, weights, write_policy

STAGES = (0, 1, 2, 3)
Make = Callable[..., InProcessPolicy]


@pytest.fixture(scope="module")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make(policy_directory: Path) -> Iterator[Make]:
    """Makes policies on a stage, None for FSDP2."""
    made: list[InProcessPolicy] = []

    def make_policy(stage: int | None, **changes: Any) -> InProcessPolicy:
        settings = TrainingSettings(
            policy_path=str(policy_directory),
            lr=1e-2,
            deepspeed=None if stage is None else DeepSpeedConfig(zero_stage=stage),
        )
        made.append(InProcessPolicy(replace(settings, **changes)))
        return made[-1]

    yield make_policy
    for policy in made:
        policy._rank.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
class TestEveryStage:
    async def test_a_resumed_run_is_the_same_to_the_last_bit_and_keeps_its_own_learning_rate(
        self, make: Make, stage: int, tmp_path: Path
    ) -> None:
        first, second = make(stage), make(stage, seed=5)
        await train(first, first_step=0, num_steps=2)
        await first.save(tmp_path / "checkpoint")
        figures = await train(first, first_step=2, num_steps=2)
        await second.forward_backward(trajectories(4, seed=1), advantages(4, seed=2), 0)  # is dropped
        await second.load(tmp_path / "checkpoint")
        assert await train(second, first_step=2, num_steps=2) == figures
        assert_close(await weights(second, tmp_path / "a"), await weights(first, tmp_path / "b"))
        slower = make(stage, lr=1e-4)
        await slower.load(tmp_path / "checkpoint")
        assert (await train(slower, first_step=2, num_steps=1))[-1]["lr"] == 1e-4

    async def test_a_loss_and_a_gradient_that_are_not_finite_stop_and_change_nothing(
        self, make: Make, stage: int, tmp_path: Path
    ) -> None:
        rows, values = trajectories(4, seed=1), advantages(4, seed=2)
        policy, reference = make(stage), make(stage)
        with pytest.raises(TrainingError, match="the loss of 4 rows at version 0 is nan on rank 0"):
            await policy.forward_backward(rows, [float("nan"), *values[1:]], 0)
        with pytest.raises(
            TrainingError, match=r"not finite over \d+ tokens at learning rate 0.01. Nothing was applied"
        ):
            await policy.step(num_tokens(rows))
        for each in (policy, reference):
            await train(each, first_step=0, num_steps=1)
        assert_close(await weights(policy, tmp_path / "a"), await weights(reference, tmp_path / "b"))

    async def test_a_mini_batch_without_any_advantage_steps_as_one_of_zero_gradients(
        self, make: Make, stage: int, tmp_path: Path
    ) -> None:
        rows = trajectories(4, seed=1)
        policy, reference = make(stage), make(None)
        for each in (policy, reference):
            await train(each, first_step=0, num_steps=1)
            await each.forward_backward(rows, [0.0] * 4, 1)
            assert (await each.step(num_tokens(rows)))["grad_norm"] == 0.0
        assert_close(await weights(policy, tmp_path / "a"), await weights(reference, tmp_path / "b"), atol=1e-5)

    async def test_a_step_towards_a_teachers_likeliest_tokens_is_that_of_fsdp(
        self, make: Make, stage: int, tmp_path: Path
    ) -> None:
        directory = str(write_policy(tmp_path / "teacher", seed=5))
        rows = trajectories(4, seed=1)
        teacher = make(None, policy_path=directory, trains=False, num_top_tokens=4)
        found = await teacher.logprobs_of(rows, LogprobModel.POLICY)
        rows = [replace(row, teacher_top=top) for row, top in zip(rows, found.top, strict=True)]
        policy, reference = (make(each, teacher_coef=0.5, max_grad_norm=0.0) for each in (stage, None))
        answers = []
        for each in (policy, reference):
            divergence = (await each.forward_backward(rows, [0.0] * 4, 0))["teacher_kl_sum"]
            answers.append((divergence, (await each.step(num_tokens(rows)))["grad_norm"]))
        assert answers[0] == pytest.approx(answers[1], rel=1e-4) and answers[0][1] > 0
        assert_close(await weights(policy, tmp_path / "a"), await weights(reference, tmp_path / "b"), atol=1e-4)

    async def test_log_probs_follow_every_step_and_exports_load(self, make: Make, stage: int, tmp_path: Path) -> None:
        policy, ids = make(stage), list(range(3, 20))
        await train(policy, first_step=0, num_steps=1)
        found = await policy.logprobs(ids)
        await policy.export_hf(tmp_path / "hf")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert found == pytest.approx(logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=1e-5)

    async def test_tied_weights_are_trained_and_written_once(self, make: Make, stage: int, tmp_path: Path) -> None:
        directory = str(write_policy(tmp_path / "tied", is_tied=True))
        policy, reference = make(stage, policy_path=directory), make(None, policy_path=directory)
        for each in (policy, reference):
            await train(each, first_step=0, num_steps=2)
        found = await weights(policy, tmp_path / "a")
        assert "lm_head.weight" not in found
        assert_close(found, await weights(reference, tmp_path / "b"), atol=1e-5)

    async def test_bfloat16_and_recomputed_activations_come_close(self, make: Make, stage: int) -> None:
        exact, close, recomputed = (
            make(stage),
            make(stage, mixed_precision=True),
            make(stage, activation_checkpointing=True),
        )
        norms = [(await train(each, first_step=0, num_steps=1))[-1]["grad_norm"] for each in (exact, close, recomputed)]
        assert norms[2] == pytest.approx(norms[0], rel=1e-6)
        assert norms[1] == pytest.approx(norms[0], rel=0.05) and norms[1] != norms[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
async def test_a_checkpoint_before_the_first_step_is_one_of_no_steps(make: Make, stage: int, tmp_path: Path) -> None:
    """Adam has no moments yet, and counts from there."""
    first, second = make(stage), make(stage, seed=5)
    await first.save(tmp_path / "checkpoint")
    await second.load(tmp_path / "checkpoint")
    assert await train(second, first_step=0, num_steps=2) == await train(first, first_step=0, num_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
async def test_a_policy_whose_first_step_was_refused_is_saved_and_resumed(
    make: Make, stage: int, tmp_path: Path
) -> None:
    """As while a critic warms up."""
    first, second, rows = make(stage), make(stage, seed=5), trajectories(4, seed=1)
    await first.forward_backward(rows, advantages(4, seed=2), 0)
    await first.step(num_tokens(rows), 0.0)
    await first.save(tmp_path / "checkpoint")
    await second.load(tmp_path / "checkpoint")
    assert await train(second, first_step=1, num_steps=2) == await train(first, first_step=1, num_steps=2)
    await first.save(tmp_path / "later")


class TestKeys:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["training.deepspeed.zero_stage=4"], "training.deepspeed.zero_stage must be .*got 4"),
            (["training.deepspeed.offload_param=true"], "zero_stage must be >= 3 with offload_param=true, got 2"),
            (["training.deepspeed.offload_optimizer=true"], "offload_optimizer must be false with training.device=cpu"),
            (
                ["training.cpu_offload=true"],
                "training.cpu_offload must be false with .*=deepspeed, got true: .* set training.deepspeed.offload_optimizer=true",
            ),
            (
                ["training.deepspeed.config=nowhere.json"],
                "training.deepspeed.config must be a JSON file, got 'nowhere.json'",
            ),
            (
                ["training.backend=fsdp", "training.deepspeed.zero_stage=3"],
                "training.backend must be deepspeed with training.deepspeed.zero_stage=3, got fsdp",
            ),
        ],
    )
    def test_those_that_cannot_be_are_refused(self, overrides: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            from_overrides("training.backend=deepspeed", "training.device=cpu", *overrides)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"train_batch_size": 64}, "must not set train_batch_size to 64: trainer.policy_mini_batch_size and"),
            (
                {"train_micro_batch_size_per_gpu": 2},
                "to 2: training.micro_batch_tokens makes micro-batches; take it out",
            ),
            ({"gradient_accumulation_steps": 4}, "to 4: gradients are accumulated until a mini-batch is in"),
            ({"optimizer": {"type": "Lamb"}}, r"optimizer to {\"type\": \"Lamb\"}: training.lr, adam_beta1"),
            ({"scheduler": {"type": "WarmupLR"}}, "scheduler .*: training.lr_schedule and num_warmup_steps"),
            ({"gradient_clipping": 5.0}, 'gradient_clipping to 5.0: training.max_grad_norm is 1; .* set it to "auto"'),
            ({"bf16": {"enabled": True}}, "bf16 .*: training.mixed_precision computes in bfloat16"),
            ({"fp16": {"enabled": "auto"}}, "fp16 .*: training.mixed_precision"),
            (
                {"communication_data_type": "bf16"},
                'communication_data_type to "bf16": gradients are reduced in float32',
            ),
            ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer to false: torch's AdamW steps"),
            (
                {"activation_checkpointing": {"partition_activations": True}},
                "activation_checkpointing to .*: training.activation_checkpointing recomputes",
            ),
            ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage to 3: training.deepspeed.zero_stage is 1"),
            ({"zero_optimization": {"overlap_comm": True}}, "overlap_comm to true: .* at stage 2 only"),
            (
                {"zero_optimization": {"offload_param": {"device": "cpu"}}},
                'offload_param.device to "cpu": it needs training.deepspeed.zero_stage >= 3',
            ),
            (
                {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                'zero_optimization.offload_optimizer.device to "cpu" with training.device=cpu: .* no device to offload from; take it out',
            ),
            ({"zero_optimization": {"offload_optimizer": True}}, "offload_optimizer to true: it is an object"),
            (
                {"gradient_allreduce_op": "sum"},
                'gradient_allreduce_op to "sum": every loss is multiplied by the number of ranks',
            ),
            ({"weight_quantization": {"bits": 8}}, "weight_quantization .*: the weights that are trained"),
            ({"expert_parallel": {"enabled": True}}, "expert_parallel .*: ranks share the data"),
            (
                {"zero_optimization": {"compute_grad_norm": False}},
                "zero_optimization.compute_grad_norm to false: a step whose gradient is not finite is refused by its norm",
            ),
            (
                {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
                "zero_optimization.zenflow .*: torch's AdamW steps",
            ),
            (
                {"zero_optimization": {"mics_shard_size": 4}},
                "zero_optimization.mics_shard_size to 4: .* no MiCS any more",
            ),
            (
                {"zero_optimization": {"cpu_offload": True}},
                "zero_optimization.cpu_offload to true: training.deepspeed.offload_optimizer does so",
            ),
            (
                {"zero_optimization": {"cpu_offload_param": True}},
                "zero_optimization.cpu_offload_param to true: training.deepspeed.offload_param does so",
            ),
            *(
                ({"zero_optimization": {f"zero_quantized_{what}": True}}, f"zero_quantized_{what} to true: {reason}")
                for what, reason in {
                    "gradients": "gradients are reduced in float32",
                    "weights": "the weights that are trained are those that are served",
                    "nontrainable_weights": "the weights that are trained are those that are served",
                }.items()
            ),
            *(
                (
                    {"zero_optimization": {"offload_optimizer": {key: value}}},
                    f"offload_optimizer.{key} to .*: torch's AdamW",
                )
                for key, value in {"ratio": 0.5, "super_offload": True}.items()
            ),
            ([1], "must hold an object, got list"),
        ],
    )
    def test_a_file_that_contradicts_ours_is_refused_with_key_value_and_what_to_change(
        self, content: Any, message: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "deepspeed.json"
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message):
            from_overrides(
                "training.backend=deepspeed",
                "training.device=cpu",
                "training.deepspeed.zero_stage=1",
                f"training.deepspeed.config={file}",
            )

    def test_a_file_that_agrees_gives_what_ours_do_not_say(self, tmp_path: Path) -> None:
        file = tmp_path / "deepspeed.json"
        content = {
            "train_batch_size": "auto",
            "gradient_clipping": 1.0,
            "communication_data_type": "fp32",
            "bf16": {"enabled": False},
            "zero_optimization": {"stage": "auto", "reduce_bucket_size": 1000, "overlap_comm": "auto"},
            "wall_clock_breakdown": True,
        }
        file.write_text(json.dumps(content))
        config = from_overrides("training.backend=deepspeed", f"training.deepspeed.config={file}")
        settings = training_settings(config, Path("unused"), 1)
        kept = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
        assert settings.deepspeed == config.training.deepspeed and settings.deepspeed_json == kept
        found = engine_config(settings.deepspeed, settings.deepspeed_json, num_ranks=2)
        assert found["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": False}
        assert found["wall_clock_breakdown"] is True and found["gradient_clipping"] == 0.0
        assert training_settings(from_overrides(), Path("unused"), 1).deepspeed is None

    def test_a_file_may_say_that_what_we_do_not_have_is_off(self, tmp_path: Path) -> None:
        file = tmp_path / "deepspeed.json"
        zero = {
            "offload_optimizer": {"device": "none", "pin_memory": "auto"},
            "offload_param": None,
            "compute_grad_norm": True,
            "zero_quantized_gradients": False,
            "zenflow": None,
            "cpu_offload": False,
        }
        file.write_text(json.dumps({"gradient_allreduce_op": "mean", "zero_optimization": zero}))
        given = ("training.backend=deepspeed", f"training.deepspeed.config={file}")
        config = from_overrides(*given, "training.device=cpu")
        assert training_settings(config, Path("unused"), 1).deepspeed_json == {"zero_optimization": {}}
        offload = DeepSpeedConfig(zero_stage=3, offload_optimizer=True, config=str(file))
        with pytest.raises(
            ConfigError,
            match='offload_optimizer.device to "none": training.deepspeed.offload_optimizer is true; take it out',
        ):
            read_user_config(offload, max_grad_norm=1.0)

    def test_it_is_chosen_by_its_name_like_the_other_backend(self) -> None:
        config = from_overrides("training=deepspeed", "training.deepspeed.zero_stage=3")
        assert training_settings(config, Path("unused"), 1).deepspeed == DeepSpeedConfig(zero_stage=3)

    def test_offloading_is_to_the_host_unless_a_file_says_where(self) -> None:
        settings = DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_param=True)
        zero = engine_config(settings, None, num_ranks=1)["zero_optimization"]
        assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
        nvme = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/scratch"}}}
        zero = engine_config(settings, nvme, num_ranks=1)["zero_optimization"]
        assert zero["offload_param"]["device"] == "nvme" and zero["offload_optimizer"]["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, *STAGES])
async def test_a_refused_step_leaves_weights_and_moments_and_a_scaled_one_goes_part_of_the_way(
    make: Make, stage: int | None, tmp_path: Path
) -> None:
    rows, values = trajectories(4, seed=1), advantages(4, seed=2)

    async def after(*scales: float) -> dict[str, Tensor]:
        policy = make(stage)
        for scale in scales:
            await policy.forward_backward(rows, values, 0)
            figures = await policy.step(num_tokens(rows), scale)
            assert (figures["grad_norm"] == 0) == (scale == 0)
            assert figures["lr"] == pytest.approx(1e-2 * scale)
        return await weights(policy, tmp_path / "-".join(map(str, scales)))

    whole, half, start = await after(1.0), await after(0.5), await after(0.0)
    assert_close(await after(0.0, 1.0), whole)
    assert_close(half, {name: (whole[name] + begin) / 2 for name, begin in start.items()}, atol=1e-6)
    assert any(not torch.equal(whole[name], begin) for name, begin in start.items())
