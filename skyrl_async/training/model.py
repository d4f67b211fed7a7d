"""A Hugging Face directory in, a float32 causal language model out, and log-probs of chosen positions from it.

Knows transformers; knows neither sharding nor losses.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from skyrl_async.errors import PolicyError

ENTROPY_CHUNK_TOKENS = 1024
"""Positions whose entropies are computed at once; bounds the extra memory at this times the vocabulary."""


def load_model(path: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load the model in ``path`` in float32 on CPU, without dropout.

    Dropout would make the policy differ from the one that sampled.

    Raises:
        PolicyError: the directory is missing, or lacks a config or some of the weights.
    """
    if not (path / "config.json").is_file():
        raise PolicyError(
            f"policy.path must be a local Hugging Face directory (config.json, *.safetensors, tokenizer files); "
            f"{path} has no config.json"
        )
    try:
        with _no_progress_bar():
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
            model, loading = AutoModelForCausalLM.from_pretrained(
                path,
                config=_without_dropout(config),
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise PolicyError(f"policy.path {path} cannot be loaded by transformers: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise PolicyError(
            f"policy.path {path} lacks {len(missing)} parameters of a {config.model_type} model, such as {missing[0]}; "
            "complete its safetensors files"
        )
    assert isinstance(model, PreTrainedModel)
    model.train()
    return model


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and (name.endswith("dropout") or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
    return config


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


class TokenLogprobs:
    """Runs a causal language model so that logits exist only where a log-prob is wanted.

    A hook in front of the output projection picks those positions, so that the model's own forward does the rest
    (scaling or soft-capping of logits included), for any architecture and under any wrapper that keeps its modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._positions: Tensor | None = None
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        if head is None:
            raise PolicyError(
                f"the policy must be a causal language model with an output projection, got {type(model)}"
            )
        head.register_forward_pre_hook(self._keep_positions)

    def _keep_positions(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._positions is None:
            return inputs
        hidden = inputs[0]  # (B, T, H)
        return (hidden.flatten(0, 1)[self._positions].unsqueeze(0), *inputs[1:])  # (1, N, H)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, targets: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each target under ``softmax(logits / temperature)``, and the entropy there.

        Args:
            input_ids: (B, T) int64, right-padded.
            positions: (N,) int64 into the B * T positions, each the one before its target.
            targets: (N,) int64.
            temperature: > 0.

        Returns:
            (N,) float32 log-probs in nats with gradients, and (N,) float32 entropies in nats without.
        """
        logits = self._logits(input_ids, positions, temperature)
        return -F.cross_entropy(logits, targets, reduction="none"), _entropies(logits)

    def logprobs(self, input_ids: Tensor, positions: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
        """The same log-probs without the entropies."""
        return -F.cross_entropy(self._logits(input_ids, positions, temperature), targets, reduction="none")

    def _logits(self, input_ids: Tensor, positions: Tensor, temperature: float) -> Tensor:
        """(N, V) float32, divided by the temperature."""
        self._positions = positions
        try:
            logits: Tensor = self._model(input_ids=input_ids, use_cache=False).logits[0]
        finally:
            self._positions = None
        logits = logits.float()
        return logits if temperature == 1.0 else logits / temperature


@torch.no_grad()
def _entropies(logits: Tensor) -> Tensor:
    """(N, V) float32 logits to (N,) entropies in nats."""
    chunks = [logits.new_zeros(0)]
    for chunk in logits.detach().split(ENTROPY_CHUNK_TOKENS):
        logprobs = chunk.log_softmax(dim=-1)
        chunks.append(-(logprobs.exp() * logprobs).sum(dim=-1))
    return torch.cat(chunks)
