"""Packed rows compared with the same rows padded, through random models of several architectures."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from skyrl_async.algorithms.batching import MicroBatch, Row, collate
from skyrl_async.columns import repeated
from skyrl_async.errors import ConfigError
from skyrl_async.training.backends import packing
from skyrl_async.training.backends.packing import ROW_BY_ROW, check_rows_are_apart, read_packed_rows
from skyrl_async.training.backends.token_logprobs import TokenLogprobs
from skyrl_async.types import Trajectory

VOCABULARY = 40
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def of(config: type, model: type, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    built = model(config(**(SIZES | changes)))
    assert isinstance(built, PreTrainedModel)
    return built.eval()


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: of(Qwen3Config, Qwen3ForCausalLM, head_dim=8),
    "eager": lambda: of(Qwen3Config, Qwen3ForCausalLM, head_dim=8, attn_implementation="eager"),
    "llama": lambda: of(LlamaConfig, LlamaForCausalLM),
    "gpt2": gpt2,
    "a window of 4": lambda: of(MistralConfig, MistralForCausalLM, sliding_window=4),
    "a capped window": lambda: of(Gemma2Config, Gemma2ForCausalLM, head_dim=8, sliding_window=4),
}
ROW_WISE = {"qwen3", "llama", "gpt2"}


def row_of(tokens: tuple[int, ...], num_prompt_tokens: int) -> Row:
    length = len(tokens) - num_prompt_tokens
    trajectory = Trajectory(
        prompt_token_ids=tokens[:num_prompt_tokens],
        response_token_ids=tokens[num_prompt_tokens:],
        loss_mask=(1,) * length,
        logprobs=(-1.0,) * length,
        versions=(0,) * length,
        reward=0.0,
    )
    return Row(trajectory=trajectory, advantages=repeated(1.0, length))


def random_rows(*lengths: int) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    return [row_of(tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()), 2) for n in lengths]


def logprobs_of(model: TokenLogprobs, batch: MicroBatch) -> Tensor:
    found, _ = model(batch.input_ids, batch.positions, batch.targets, temperature=1.0, row_lengths=batch.row_lengths)
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_as_on_cuda", [False, True])
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones_to_1e_6(
    kind: str, is_as_on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(7, 3, 19, 12, 4)
    padded = MODELS[kind]()
    packed = copy.deepcopy(padded)
    read_packed_rows(packed)
    check_rows_are_apart(packed)
    assert (packed.config._attn_implementation == ROW_BY_ROW) is (kind in ROW_WISE)
    num_heads: set[tuple[int, int]] = set()
    compute = torch.nn.functional.scaled_dot_product_attention

    def noting(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
        num_heads.add((query.shape[1], key.shape[1]))
        assert not (is_as_on_cuda and kind in ROW_WISE and others.get("enable_gqa"))
        return compute(query, key, value, **others)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_lacks_grouped_kernel", lambda _: is_as_on_cuda)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
        here = logprobs_of(TokenLogprobs(packed, chunk_size=16), collate(rows, CPU, is_packed=True))
    assert (kind == "qwen3") <= (num_heads == {(2, 2 if is_as_on_cuda else 1)})
    there = logprobs_of(TokenLogprobs(padded, chunk_size=16), collate(rows, CPU, is_packed=False))
    torch.testing.assert_close(here, there, atol=1e-6, rtol=1e-6)
    coefficients = torch.linspace(-1, 1, len(here)) / len(here)
    (coefficients * here).sum().backward()
    (coefficients * there).sum().backward()
    for (name, parameter), (_, other) in zip(packed.named_parameters(), padded.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module", params=["qwen3", "a window of 4"])
def packed_model(request: pytest.FixtureRequest) -> TokenLogprobs:
    model = MODELS[request.param]()
    read_packed_rows(model)
    return TokenLogprobs(model, chunk_size=16)


tokens = st.integers(0, VOCABULARY - 1)


@given(
    rows=st.lists(st.lists(tokens, min_size=3, max_size=9), min_size=2, max_size=5),
    where=st.integers(0, 1000),
    token=tokens,
)
def test_another_token_in_one_row_never_changes_the_log_probs_of_the_others(
    packed_model: TokenLogprobs, rows: list[list[int]], where: int, token: int
) -> None:
    changed = where % len(rows)
    others = copy.deepcopy(rows)
    others[changed][where % len(rows[changed])] = token
    with torch.no_grad():
        before, after = (
            logprobs_of(packed_model, collate([row_of(tuple(r), 1) for r in version], CPU, is_packed=True)).split(
                [len(r) - 1 for r in version]
            )
            for version in (rows, others)
        )
    for index, (here, there) in enumerate(zip(before, after, strict=True)):
        if index != changed:
            torch.testing.assert_close(here, there, atol=1e-6, rtol=1e-6)


def test_a_model_that_carries_a_state_from_row_to_row_is_refused_with_the_key() -> None:
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4, initializer_range=0.5)
    ).eval()
    read_packed_rows(model)
    with pytest.raises(ConfigError, match=r"training.use_sample_packing must be false for MambaForCausalLM, got True"):
        check_rows_are_apart(model)
