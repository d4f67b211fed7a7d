"""Engines, checkpoints and exports know a policy's tensors by the names in its files, also where transformers has others for them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from skyrl_async.composition.data import check_checkpoint_is_of
from skyrl_async.errors import PolicyError
from skyrl_async.inference.policy_files import UpdateValidator, read_manifest
from skyrl_async.training.backends.file_names import FileNames
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from tests.cpu.tiny_policies import assert_close, export_weights, weights

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, head_dim=16))


def mixtral() -> PreTrainedModel:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **tokens, num_local_experts=4))


def gemma3() -> PreTrainedModel:
    """With an image tower, and a prefix that the model's modules have not."""
    vision = {**VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config={**SIZES, "head_dim": 16}, vision_config=vision))


def qwen3_5() -> PreTrainedModel:
    """With an image tower, which transformers leaves out of the language model."""
    text = {**SIZES, "head_dim": 16, "layer_types": ["full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


def glm4_moe() -> PreTrainedModel:
    """Its routers' correction biases are buffers."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **experts, head_dim=16, first_k_dense_replace=0))


def written(directory: Path, make: Callable[[], PreTrainedModel]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    make().save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("make", [qwen3_moe, mixtral, gemma3])
def test_what_is_published_saved_and_exported_has_the_names_and_values_of_the_policys_files(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    files = written(tmp_path / "policy", make)
    settings = TrainingSettings(policy_path=str(tmp_path / "policy"), use_sample_packing=False)

    async def main() -> None:
        policy = InProcessPolicy(settings)
        update = await export_weights(policy, 1, tmp_path / "published", 1 << 20)
        assert_close(load_file(update.path), {name: files[name] for name in update.manifest})
        UpdateValidator(str(tmp_path / "policy")).check(update)
        await policy.save(tmp_path / "checkpoint" / "policy")
        check_checkpoint_is_of(tmp_path / "checkpoint", tmp_path / "policy")
        await policy.close()

    asyncio.run(main())


@pytest.mark.slow
def test_biases_that_choose_experts_are_not_rounded_to_the_dtype_that_is_served(tmp_path: Path) -> None:
    """Scores differ by less than 1, and bfloat16 has steps of 0.06 near 10."""
    torch.manual_seed(0)
    model = glm4_moe()
    biases = {name: bias for name, bias in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(10 + torch.rand_like(bias))
    model.save_pretrained(tmp_path / "policy")
    files = load_file(tmp_path / "policy" / "model.safetensors")
    settings = TrainingSettings(policy_path=str(tmp_path / "policy"), serve_dtype="bfloat16", use_sample_packing=False)

    async def main() -> None:
        policy = InProcessPolicy(settings)
        update = await export_weights(policy, 1, tmp_path / "published", 1 << 20)
        await policy.export_hf(tmp_path / "exported")
        await policy.close()
        for found in (load_file(update.path), load_file(tmp_path / "exported" / "model.safetensors")):
            names = [name for name in found if name.endswith("e_score_correction_bias")]
            assert len(names) == len(biases) and all(torch.equal(found[name], files[name]) for name in names)
            assert found["model.embed_tokens.weight"].dtype == torch.bfloat16

    assert biases
    asyncio.run(main())


@pytest.mark.slow
def test_workers_that_do_not_train_put_published_experts_together_again(tmp_path: Path) -> None:
    policy_path = str(tmp_path / "policy")
    written(tmp_path / "policy", qwen3_moe)
    torch.manual_seed(1)
    qwen3_moe().save_pretrained(tmp_path / "other")

    async def main() -> None:
        other = InProcessPolicy(TrainingSettings(policy_path=str(tmp_path / "other")))
        update = await export_weights(other, 1, tmp_path / "published", 1 << 20)
        await other.close()
        forward = InProcessPolicy(TrainingSettings(policy_path=policy_path, trains=False))
        forward._rank.load_weights(update)
        assert_close(await weights(forward, tmp_path / "again"), load_file(update.path))
        await forward.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_policy_whose_files_hold_more_than_its_language_model_is_refused_before_it_trains(tmp_path: Path) -> None:
    written(tmp_path, qwen3_5)
    with pytest.raises(PolicyError, match=r"holds 21 tensors, such as model\.visual\..*; give a directory of the lang"):
        InProcessPolicy(TrainingSettings(policy_path=str(tmp_path)))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_weights_that_a_directory_holds_once_more_in_another_format_are_not_the_models(
    tmp_path: Path, is_sharded: bool
) -> None:
    """As those of Mistral do."""
    model = mixtral()
    model.save_pretrained(tmp_path, max_shard_size="20KB" if is_sharded else "1GB")
    expected = read_manifest(str(tmp_path))
    assert is_sharded == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    assert read_manifest(str(tmp_path)) == expected
    FileNames(model).check_all_are_in(tmp_path)
