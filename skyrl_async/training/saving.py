"""Small states of torch's on disk. ``torch.save`` to a path says "unexpected pos" where a disk is full; this says so."""

import io
from pathlib import Path
from typing import Any

import torch


def save_state(value: Any, path: Path) -> None:
    """Like ``torch.save``. Raises ``OSError`` with the system's reason."""
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getvalue())
