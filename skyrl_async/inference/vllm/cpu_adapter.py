"""Adapters on a CPU at the cost of two small products per layer, where vLLM would copy A and B for each token of a batch.

vLLM's own operations are for batches with many adapters; here all requests have the same one. Other batches go to vLLM's operations.
"""

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform


class OneAdapterCPU(PunicaWrapperCPU):
    """vLLM's adapter operations, with a faster one for batches of one adapter."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add ``scale B A x`` to each part of ``y``.

        Args:
            y: (N, out), outputs of a layer, or of the parts of a fused one side by side; written in place.
            x: (N, in).
            lora_a_stacked: per part, (adapters, 1, rank, in).
            lora_b_stacked: per part, (adapters, 1, out of the part, rank).
            scale: factor.
            output_slices: columns of each part.
        """
        is_of_one = self.is_prefill and self.batch_size == 1 and x.shape[0] == self.token_nums
        if not is_of_one:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        if self.no_lora:
            return
        slot = int(self._lora_indices_per_batch[0])
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + width].addmm_(x @ a[slot, 0].T, b[slot, 0].T, alpha=scale)
            start += width


def use_on_cpus() -> None:
    """Use ``OneAdapterCPU`` for models on CPUs in this process; other platforms have their own kernels."""
    name = f"{OneAdapterCPU.__module__}.{OneAdapterCPU.__qualname__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: name)
