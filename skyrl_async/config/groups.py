"""The named starting points of a run: what ``task=relay`` or ``engine=deterministic`` set.

Flows in: nothing. Flows out: plain values per group and option, each inside its own node of ``schema.Config``. Knows
neither hydra nor which options exist elsewhere; single keys on the command line override what a group sets.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of a group."""

    text: str
    """What choosing it means, one line."""
    values: dict[str, Any] = field(default_factory=dict)
    """Keys of the group's node that it sets; nested as in the node."""
    required: tuple[str, ...] = ()
    """Keys of the group's node that must then be set by the user."""


GROUPS: dict[str, dict[str, Option]] = {
    "task": {
        "lagged_fibonacci": Option(
            text="Extend a digit string until a 0 appears: long-tailed answers, made on the spot.",
            values={"name": "lagged_fibonacci"},
        ),
        "relay": Option(text="A multi-turn environment, made on the spot.", values={"name": "relay"}),
        "trail": Option(
            text="Turns with a function tool, made on the spot; for generator=agent, which brings the tool.",
            values={"name": "trail"},
        ),
        "dataset": Option(
            text="Your own prompts: task.train_files and task.eval_files.",
            values={"name": "dataset"},
            required=("train_files",),
        ),
        "reasoning_gym": Option(
            text="A task of reasoning-gym: task.reasoning_gym.dataset.",
            values={"name": "reasoning_gym"},
        ),
    },
    "policy": {
        "tiny": Option(text="A Qwen3 of 0.6M parameters, built and warm-started on the spot.", values={"path": None}),
        "hf": Option(
            text="A local Hugging Face directory: policy.path; served in bfloat16.",
            values={"dtype": "bfloat16", "warm_start": {"enabled": False}},
            required=("path",),
        ),
    },
    "engine": {
        "vllm": Option(text="vLLM, on GPU or CPU.", values={"backend": "vllm"}),
        "deterministic": Option(
            text="transformers, one request at a time: slow, bit-reproducible.",
            values={"backend": "deterministic", "device": "cpu"},
        ),
    },
    "generator": {
        "gym": Option(text="skyrl_gym environments over generate(), in process.", values={"kind": "gym"}),
        "gym_http": Option(text="skyrl_gym environments over the endpoint.", values={"kind": "gym_http"}),
        "agent": Option(
            text="Any harness, unmodified, against the endpoint: generator.command or generator.entrypoint.",
            values={"kind": "agent"},
        ),
    },
    "training": {
        "fsdp": Option(text="FSDP2 on any number of ranks.", values={"backend": "fsdp"}),
        "deepspeed": Option(text="DeepSpeed's ZeRO: training.deepspeed.zero_stage.", values={"backend": "deepspeed"}),
    },
}
"""Group -> option -> what it sets; the first option is the default."""


def default_option(group: str) -> str:
    """The option a group takes when the command line names none."""
    return next(iter(GROUPS[group]))
