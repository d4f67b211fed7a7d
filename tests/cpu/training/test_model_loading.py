"""A loaded model in train mode computes what its sampler does: dropout and jitter of its configuration are off."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    DbrxConfig,
    MixtralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RoFormerConfig,
)

from skyrl_async.config.schema.policy import LoraConfig
from skyrl_async.training.backends.assembly import _draw_nothing, load_model
from skyrl_async.training.backends.lora import add_adapters

IDS = torch.arange(24).reshape(2, 12) % 48
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}
EXPERTS = SIZES | {"num_key_value_heads": 1, "intermediate_size": 64, "num_local_experts": 8}
NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "of hidden states and attention": BioGptConfig(
        **SIZES,
        intermediate_size=64,
        hidden_dropout_prob=0.5,
        attention_probs_dropout_prob=0.5,
        activation_dropout=0.5,
        layerdrop=0.5,
    ),
    "of modules": RoFormerConfig(
        **SIZES, intermediate_size=64, is_decoder=True, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5
    ),
    "in parts of the configuration": DbrxConfig(
        vocab_size=48,
        d_model=32,
        n_layers=2,
        n_heads=2,
        initializer_range=0.5,
        attn_config={"attn_pdrop": 0.5, "kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_jitter_eps": 0.3,
            "hidden_size": 32,
        },
    ),
    "jitter before the router": MixtralConfig(**EXPERTS, **NO_TOKENS, router_jitter_noise=0.5),
    "ties of the router": PhimoeConfig(**EXPERTS, **NO_TOKENS, router_jitter_noise=0.3, input_jitter_noise=0.3),
}


def written(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_that_trains_draws_nothing_and_computes_what_one_that_samples_does(kind: str, tmp_path: Path) -> None:
    path = written(CONFIGS[kind], tmp_path)
    model = load_model(path, trust_remote_code=False)
    assert model.training, "layers are recomputed in train mode only"
    first = logits(model)
    assert torch.equal(logits(model), first)
    sampler = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.testing.assert_close(first, logits(sampler), atol=1e-5, rtol=0)


def test_dropout_that_no_key_names_is_off_too() -> None:
    """As code that comes with a model may have it."""
    model = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5))
    _draw_nothing(model)
    assert torch.equal(model(torch.ones(64)), torch.ones(64))


def test_dropout_of_adapters_is_drawn_beside_it(tmp_path: Path) -> None:
    model = load_model(written(CONFIGS["of hidden states and attention"], tmp_path), trust_remote_code=False)
    settings = LoraConfig(rank=2, alpha=4.0, dropout=0.5)
    for layer in add_adapters(model, settings, seed=0).values():
        torch.nn.init.ones_(layer.lora_B["default"].weight)
    assert torch.equal(logits(model), logits(model)), "log-probs are without it"
    with torch.enable_grad():
        one, other = (model(input_ids=IDS, use_cache=False).logits for _ in range(2))
    assert not torch.allclose(one, other, atol=1e-2)
