"""Every test of this folder needs a CUDA device, and says so where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
