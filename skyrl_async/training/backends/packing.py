"""Sample packing: a model reads rows laid end to end in one sequence, each row on its own, without computing on padding.

Knows neither log-probs nor losses.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from skyrl_async.errors import ConfigError

ROW_BY_ROW = "skyrl_async_row_by_row"
"""The name of the attention below in transformers' registry."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between logits that should be equal, relative to the largest logit."""


def row_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: tuple[int, ...] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed sequence; without ``row_lengths``, over the full sequence.

    A mask over the full sequence would cost the square of its length, most of it masked.

    Args:
        module: the attention layer.
        query: (1, heads, T, head_dim); key and value likewise.
        attention_mask: None.
        row_lengths: sums to T.
        others: passed by transformers to torch's scaled_dot_product_attention.

    Returns:
        (1, T, heads, head_dim), and None for the attention weights.
    """
    lengths = (query.shape[2],) if row_lengths is None else row_lengths
    if _lacks_grouped_kernel(query):
        num_repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, num_repeats), repeat_kv(value, num_repeats)
        module = nn.Identity()  # has no groups of heads, so that transformers repeats nothing
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *row, attention_mask, **others)[0] for row in rows], dim=1), None


def _lacks_grouped_kernel(query: Tensor) -> bool:
    """Whether torch would keep all attention weights of heads that share keys: on CUDA its kernel for those takes 16 bits only."""
    device = query.device.type
    return device == "cuda" and query.dtype == torch.float32 and not torch.is_autocast_enabled(device)


def _no_mask(*_: Any, **__: Any) -> None:
    """Row-by-row attention is causal without a mask."""


AttentionInterface.register(ROW_BY_ROW, row_by_row)
AttentionMaskInterface.register(ROW_BY_ROW, _no_mask)


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an engine, which has it as ``module`` and may have its own ``config``."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, PreTrainedModel)
    return inner


def read_packed_rows(model: nn.Module) -> None:
    """Switch ``model`` to row-by-row attention if it uses torch's scaled_dot_product_attention and attends to all previous tokens.

    FlashAttention finds the rows by their position ids. So does transformers' mask for every other attention, at the cost of the
    squared length of all rows.
    """
    inner = _unwrapped(model)
    config = inner.config.get_text_config()
    if config._attn_implementation == "sdpa" and not _attends_locally(config):
        inner.set_attn_implementation(ROW_BY_ROW)


def _attends_locally(config: PreTrainedConfig) -> bool:
    """Whether some layers attend to the nearest tokens only."""
    settings = config.to_dict()
    return any(settings.get(name) is not None for name in ("sliding_window", "attention_chunk_size"))


def packed_arguments(model: nn.Module, row_lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """The arguments of a forward over packed rows, beside the token ids."""
    positions = torch.cat([torch.arange(length) for length in row_lengths])
    arguments: dict[str, Any] = {"position_ids": positions.unsqueeze(0).to(device)}
    if _unwrapped(model).config.get_text_config()._attn_implementation == ROW_BY_ROW:
        arguments["row_lengths"] = row_lengths
    return arguments


@torch.no_grad()
def check_rows_are_apart(model: nn.Module) -> None:
    """Check that one row, packed twice, gets the same logits twice. Collective.

    Raises:
        ConfigError: a row changes with the rows before it.
    """
    parameter = next(model.parameters())
    row = torch.arange(1, 5, device=parameter.device)
    arguments = packed_arguments(model, (4, 4), parameter.device)
    logits: Tensor = model(input_ids=row.repeat(2).unsqueeze(0), use_cache=False, **arguments).logits[0]
    first, second = logits.chunk(2)
    tolerance = _TOLERANCE.get(logits.dtype, 5e-2) * first.abs().max().item()
    if not torch.allclose(first, second, atol=tolerance, rtol=0):
        difference = (first - second).abs().max().item()
        raise ConfigError(
            f"training.use_sample_packing must be false for {type(_unwrapped(model)).__name__}, got True: rows laid end to end see each "
            f"other (the same row's logits differ by {difference:.3g})"
        )
