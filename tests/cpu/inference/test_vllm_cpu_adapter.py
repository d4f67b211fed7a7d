"""Adapters on CPUs by two products per layer, against vLLM's own operations, row by row; and which layers have them."""

from pathlib import Path

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from skyrl_async.inference.vllm.adapter import adapted_modules
from skyrl_async.inference.vllm.cpu_adapter import OneAdapterCPU
from tests.engine_checks import make_policy

pytestmark = pytest.mark.slow  # vLLM is imported

WIDTHS = (6, 3, 3)
NUM_IN, RANK, NUM_SLOTS = 5, 8, 2


@pytest.mark.parametrize(
    "adapters_of_rows",
    [(1, 1, 1, 1), (2, 2, 2), (1, 1, 2, 1), (0, 0, 0, 0), (2,)],
    ids=["first", "second", "both", "none", "one row"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.05)])
def test_outputs_are_vllms(adapters_of_rows: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    down = tuple(draw(NUM_SLOTS, 1, RANK, NUM_IN) for _ in WIDTHS)
    up = tuple(draw(NUM_SLOTS, 1, width, RANK) for width in WIDTHS)
    x, y = draw(len(adapters_of_rows), NUM_IN), draw(len(adapters_of_rows), sum(WIDTHS))
    found = []
    for kind in (OneAdapterCPU, PunicaWrapperCPU):
        operations = kind(64, max_batches=8, device="cpu", lora_config=LoRAConfig(max_loras=NUM_SLOTS))
        mapping = LoRAMapping(adapters_of_rows, adapters_of_rows, is_prefill=True)
        operations.update_metadata(mapping, [1, 2], NUM_SLOTS + 1, 100)
        found.append(y.clone())
        operations.add_lora_linear(found[-1], x, down, up, 0.5, WIDTHS)
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)
    is_adapted = torch.tensor(adapters_of_rows) > 0
    assert ((found[0] != y).all(1) == is_adapted).all()


def test_layers_that_no_adapter_is_on_are_spared(tmp_path: Path) -> None:
    policy = str(make_policy(tmp_path / "policy", seed=0, is_tied=False))
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert adapted_modules(policy, ()) == every
    assert adapted_modules(policy, ("mlp.up_proj", "q_proj")) == ["q_proj", "up_proj"]
    for path in (tmp_path / "policy").glob("*.safetensors"):
        path.unlink()
    assert adapted_modules(policy, ()) is None
