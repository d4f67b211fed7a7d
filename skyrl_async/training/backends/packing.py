"""A model that reads rows laid end to end in one sequence, each on its own, and without computing on padding.

Flows in: a transformers model, made once to do so; then the rows' lengths. Flows out: what to call the model with beside the token
ids. Knows neither log-probs nor losses.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from skyrl_async.errors import ConfigError

ROW_BY_ROW = "skyrl_async_row_by_row"
"""Of the attention below, among those that transformers knows."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of logits that should be equal, relative to the largest."""


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
    """Causal attention within each of the rows that a sequence is made of; of the whole sequence where it is one.

    A mask over the whole sequence would cost the square of its length, most of it masked.

    Args:
        module: the attention layer.
        query: (1, heads, T, head_dim); key and value likewise.
        attention_mask: None.
        row_lengths: sums to T.
        others: passed to torch's scaled_dot_product_attention by way of transformers.

    Returns:
        (1, T, heads, head_dim), and no weights.
    """
    lengths = (query.shape[2],) if row_lengths is None else row_lengths
    if _has_no_kernel_for_groups(query):
        num_repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, num_repeats), repeat_kv(value, num_repeats)
        module = nn.Identity()  # which has no groups of heads
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *row, attention_mask, **others)[0] for row in rows], dim=1), None


def _has_no_kernel_for_groups(query: Tensor) -> bool:
    """On CUDA there is one for heads that share keys in 16 bits alone; in float32 torch would keep all weights, a row's length squared."""
    device = query.device.type
    return device == "cuda" and query.dtype == torch.float32 and not torch.is_autocast_enabled(device)


def _no_mask(*_: Any, **__: Any) -> None:
    """Attention row by row is causal without one."""


AttentionInterface.register(ROW_BY_ROW, row_by_row)
AttentionMaskInterface.register(ROW_BY_ROW, _no_mask)


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model itself: what wraps it to prepare its backward passes has it as its ``module``, and may have a ``config`` of its own."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, PreTrainedModel)
    return inner


def read_packed_rows(model: nn.Module) -> None:
    """Make ``model`` attend row by row where it attends by torch's scaled_dot_product_attention to everything before a token.

    FlashAttention finds the rows by their position ids; so does transformers' mask for every other attention, at the cost of the square
    of all rows' length.
    """
    inner = _unwrapped(model)
    config = inner.config.get_text_config()
    if config._attn_implementation == "sdpa" and not _is_local(config):
        inner.set_attn_implementation(ROW_BY_ROW)


def _is_local(config: PreTrainedConfig) -> bool:
    """Some layers see the nearest tokens only."""
    settings = config.to_dict()
    return any(settings.get(name) is not None for name in ("sliding_window", "attention_chunk_size"))


def packed_arguments(model: nn.Module, row_lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """What the forward of rows of ``row_lengths`` laid end to end takes beside their ids."""
    positions = torch.cat([torch.arange(length) for length in row_lengths])
    arguments: dict[str, Any] = {"position_ids": positions.unsqueeze(0).to(device)}
    if _unwrapped(model).config.get_text_config()._attn_implementation == ROW_BY_ROW:
        arguments["row_lengths"] = row_lengths
    return arguments


@torch.no_grad()
def check_rows_are_apart(model: nn.Module) -> None:
    """See that the same row laid end to end twice has the same logits twice. Every rank calls it at the same time.

    Raises:
        ConfigError: what comes before a row changes it.
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
