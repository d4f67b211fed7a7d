"""A critic's head is that of its own directory, or the log says that it is random."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.assembly import load_model
from skyrl_async.training.backends.token_values import replace_head
from tests.cpu.tiny_policies import write_policy


def begin(directory: Path, **head: Tensor) -> Tensor:
    """The head of a critic that begins with a model with this one."""
    save_file({f"score.{name}": tensor for name, tensor in head.items()}, directory / "head.safetensors")
    model = load_model(write_policy(directory, hidden_size=32), trust_remote_code=False)
    replace_head(model, directory, seed=0)
    projection = model.get_output_embeddings()
    assert isinstance(projection, torch.nn.Linear)
    return projection.weight


def test_the_log_says_whether_a_critic_begins_with_its_own_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert begin(tmp_path).any()
    assert f"random value head: no *.safetensors of {tmp_path} has score.weight" in caplog.text
    assert begin(tmp_path, weight=torch.full((1, 32), 2.0), bias=torch.zeros(1)).eq(2).all()
    assert f"begins with the value head of {tmp_path}" in caplog.text


def test_a_head_that_a_critic_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"score.weight of shape \[1, 32\], got \[2, 32\]; give"):
        begin(tmp_path, weight=torch.ones(2, 32))
    with pytest.raises(PolicyError, match=r"no score.bias but 0 .*, got \[0.5\]; give"):
        begin(tmp_path, weight=torch.ones(1, 32), bias=torch.tensor([0.5]))
