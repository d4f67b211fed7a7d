"""Log-probs and entropies computed in chunks, compared with the full logits of plain transformers."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.token_logprobs import Entropies, TokenLogprobs

VOCABULARY = 50
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def qwen3(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"head_dim": 8} | changes)))


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64))


def of(config: type, model: type, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    built = model(config(**(SIZES | changes)))
    assert isinstance(built, PreTrainedModel)
    return built


UNCHANGED = {
    "untied": lambda: qwen3(tie_word_embeddings=False),
    "tied": lambda: qwen3(tie_word_embeddings=True),
    "a bias": lambda: of(PhiConfig, PhiForCausalLM, resid_pdrop=0.0, embd_pdrop=0.0),
    "gpt2": lambda: gpt2().eval(),
    "llama": lambda: of(LlamaConfig, LlamaForCausalLM),
}
CHANGED = {
    "capped": lambda: of(Gemma2Config, Gemma2ForCausalLM, head_dim=8, final_logit_softcapping=2.0),
    "divided": lambda: of(GraniteConfig, GraniteForCausalLM, logits_scaling=8.0),
    "multiplied": lambda: of(CohereConfig, CohereForCausalLM, logit_scale=0.25),
}


def batch(num_tokens: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    """(3, 14) ids, and positions and targets of ``num_tokens`` of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (3, 14), generator=generator)
    positions = torch.randperm(42, generator=generator)[:num_tokens].sort().values
    return ids, positions, torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)


def reference(model: nn.Module, num_tokens: int, temperature: float) -> tuple[Tensor, Tensor]:
    ids, positions, targets = batch(num_tokens)
    logits = model(ids).logits.flatten(0, 1)[positions] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(targets), distribution.entropy()


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    """To 1e-6 of the largest."""
    assert here.keys() == there.keys()
    scale = max(1.0, *(gradient.abs().max().item() for gradient in there.values()))
    for name, gradient in there.items():
        torch.testing.assert_close(here[name], gradient, atol=1e-6 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("chunk_size", [1, 8, 33, 1024])
@pytest.mark.parametrize("kind", [*UNCHANGED, *CHANGED])
def test_values_and_gradients_are_those_of_whole_logits_to_1e_6(kind: str, chunk_size: int) -> None:
    make = (UNCHANGED | CHANGED)[kind]
    expected, entropies = reference(plain := make(), 33, 0.7)
    weights = torch.linspace(-1, 1, 33)
    found, found_entropies = TokenLogprobs(model := make(), chunk_size=chunk_size)(
        *batch(33), temperature=0.7, entropies=Entropies.GRADIENTS
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found_entropies, entropies, atol=1e-6, rtol=1e-6)
    assert_same(
        gradients((weights * found + 0.3 * found_entropies).sum(), model),
        gradients((weights * expected + 0.3 * entropies).sum(), plain),
    )


@pytest.mark.parametrize("chunk_size", [8, 1024])
@pytest.mark.parametrize("kind", [*UNCHANGED, *CHANGED])
def test_other_tokens_and_the_rest_have_the_log_probs_and_gradients_of_whole_logits(kind: str, chunk_size: int) -> None:
    make = (UNCHANGED | CHANGED)[kind]
    ids, positions, targets = batch(33)
    whole = (plain := make())(ids).logits.flatten(0, 1)[positions].div(0.7).log_softmax(-1)
    top_ids = whole.argsort(-1, descending=True)[:, :3]
    is_top = torch.zeros_like(whole, dtype=torch.bool).scatter(-1, top_ids, True)
    rest = whole.exp().masked_fill(is_top, 0.0).sum(-1, keepdim=True).log()
    expected, weights = torch.cat([whole.gather(-1, top_ids), rest], -1), torch.linspace(-1, 1, 33).unsqueeze(-1)
    token_logprobs = TokenLogprobs(model := make(), chunk_size=chunk_size)
    chosen = token_logprobs.scores(ids, positions, targets, temperature=0.7, top=3)
    found = token_logprobs.scores(ids, positions, targets, temperature=0.7, top=top_ids.int())
    assert torch.equal(chosen.top_ids, top_ids) and torch.equal(chosen.top_logprobs, found.top_logprobs)
    torch.testing.assert_close(found.top_logprobs, expected, atol=1e-6, rtol=1e-6)
    assert_same(
        gradients((weights * found.top_logprobs).sum(), model),
        gradients((weights * expected).sum(), plain),
    )


def test_the_rest_of_a_model_that_is_sure_is_not_rounded_away() -> None:
    model = qwen3(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(60.0)
    ids, positions, targets = batch(33)
    exact = (model(ids).logits.flatten(0, 1)[positions].double()).log_softmax(-1).sort(-1, descending=True)
    rest = exact.values[:, 4:].logsumexp(-1)
    found = TokenLogprobs(model, chunk_size=8).scores(ids, positions, targets, temperature=1.0, top=4)
    assert rest.min() < -20 and found.top_ids.tolist() == exact.indices[:, :4].tolist()
    torch.testing.assert_close(found.top_logprobs[:, 4].double(), rest, atol=1e-4, rtol=1e-6)


def test_entropies_come_without_gradient_where_none_is_asked_for() -> None:
    expected, entropies = reference(plain := qwen3(), 33, 1.0)
    token_logprobs = TokenLogprobs(model := qwen3(), chunk_size=8)
    found, found_entropies = token_logprobs(*batch(33), temperature=1.0, entropies=Entropies.VALUES)
    torch.testing.assert_close(found_entropies, entropies.detach(), atol=1e-6, rtol=0)
    assert_same(gradients(found.sum(), model), gradients(expected.sum(), plain))
    _, none = token_logprobs(*batch(33), temperature=1.0)
    assert not found_entropies.requires_grad and not none.requires_grad and not none.any()


@pytest.mark.parametrize("kind", [*UNCHANGED, *CHANGED])
def test_a_model_that_scales_or_caps_its_logits_is_found_out_and_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="skyrl_async"):
        TokenLogprobs((UNCHANGED | CHANGED)[kind](), chunk_size=8)
    assert [r.message.partition(":")[0] for r in caplog.records if r.name.startswith("skyrl_async")] == (
        [f"{type(CHANGED[kind]()).__name__} changes the logits of its output projection"] if kind in CHANGED else []
    )


def test_an_idle_forward_without_tokens_still_reaches_every_parameter() -> None:
    ids, _, _ = batch()
    nothing = torch.empty(0, dtype=torch.int64)
    logprobs, entropies = TokenLogprobs(model := qwen3(), chunk_size=8)(ids, nothing, nothing, temperature=1.0)
    assert logprobs.shape == entropies.shape == (0,)
    assert len(gradients(logprobs.sum(), model)) == len(list(model.named_parameters()))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return made


@pytest.mark.parametrize("tied", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_made_forwards_or_backwards(tied: bool) -> None:
    vocabulary, chunk_size = 4000, 32
    ids = torch.arange(513).unsqueeze(0)
    long_batch = ids, torch.arange(512), ids[0, 1:]
    model = qwen3(vocab_size=vocabulary, max_position_embeddings=1024, tie_word_embeddings=tied, num_hidden_layers=1)
    token_logprobs = TokenLogprobs(model, chunk_size=chunk_size)
    with LargestTensor() as largest:
        settings = {"temperature": 0.7, "entropies": Entropies.GRADIENTS}
        top_ids = token_logprobs.scores(*long_batch, **settings, top=8).top_ids
        found = token_logprobs.scores(*long_batch, **settings, top=top_ids.int())
        (found.logprobs + found.entropies + found.top_logprobs.sum(-1)).sum().backward()
    assert largest.num_elements <= max(
        chunk_size * vocabulary, 2 * 512 * 512
    )  # a chunk's logits, or attention's scores
    with LargestTensor() as whole:
        TokenLogprobs(model, chunk_size=512)(*long_batch, temperature=0.7)[0].sum().backward()
    assert whole.num_elements == 512 * vocabulary


def test_a_model_without_an_output_projection_is_refused() -> None:
    with pytest.raises(PolicyError, match="causal language model with an output projection"):
        TokenLogprobs(nn.Linear(2, 2), chunk_size=8)
