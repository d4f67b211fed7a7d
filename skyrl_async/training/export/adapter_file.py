"""``adapter.json`` of a checkpoint that holds adapters alone: which ones, and which weights they belong to.

Flows in: what a rank trains. Flows out: a file beside the backend's own, or ``CheckpointError`` where a checkpoint is of something
else. Knows neither torch nor what the adapters are.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from skyrl_async.errors import CheckpointError

ADAPTER_FILE = "adapter.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """What has to be the same for a checkpoint of adapters to be of use."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Names of the layers that have one, in the model's order."""
    base: str
    """Directory that the weights beneath were loaded from; for people, since it may have moved."""
    base_checksum: str
    """Of those weights."""

    def write(self, directory: Path) -> None:
        """Beside the adapters."""
        (directory / ADAPTER_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def check_adapter(directory: Path, here: AdapterDescription | None) -> None:
    """Raise ``CheckpointError``, saying what to change, unless ``directory`` holds what is trained ``here`` (None: all the weights)."""
    path = directory / ADAPTER_FILE
    if here is None:
        if path.is_file():
            there = _read(path)
            raise CheckpointError(
                f"checkpoint {directory} holds adapters of rank {there.rank} over {there.base}, and policy.lora.rank is 0; set "
                f"policy.lora.rank={there.rank}, or trainer.resume_mode=none"
            )
        return
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint {directory} holds all weights and no adapters, and policy.lora.rank is {here.rank}; set policy.lora.rank=0, or "
            "train adapters over an export of it (policy.path) with trainer.resume_mode=none"
        )
    there = _read(path)
    for key in ("rank", "alpha"):
        if (found := getattr(there, key)) != (wanted := getattr(here, key)):
            raise CheckpointError(
                f"checkpoint {directory} holds adapters with {key} {found}, and policy.lora.{key} is {wanted}; set it to {found}, or "
                "trainer.resume_mode=none"
            )
    if difference := sorted(set(there.modules) ^ set(here.modules)):
        raise CheckpointError(
            f"checkpoint {directory} has adapters on other layers ({len(difference)} differ, such as {difference[0]}); set "
            "policy.lora.target_modules and exclude_modules as they were, or trainer.resume_mode=none"
        )
    if there.base_checksum != here.base_checksum:
        raise CheckpointError(
            f"checkpoint {directory} holds adapters over {there.base}, and the weights of {here.base} are others; set policy.path to the "
            "policy they were trained over, or trainer.resume_mode=none"
        )


def _read(path: Path) -> AdapterDescription:
    try:
        content = json.loads(path.read_text())
        return AdapterDescription(**content | {"modules": tuple(content["modules"])})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); resume from another checkpoint") from error
