"""The named starting points of a run: what ``policy=tiny`` or ``engine=deterministic`` set.

Single keys on the command line override what a group sets. The schema's defaults are for models of 1 to 8 billion parameters; the values
of the toy are in ``policy=tiny``.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of a group."""

    text: str
    """What choosing it means, one line."""
    values: dict[str, Any] = field(default_factory=dict)
    """Keys that it sets, nested as in ``schema.Config``."""
    required: tuple[str, ...] = ()
    """Keys of the group's node that must then be set by the user."""


GROUPS: dict[str, dict[str, Option]] = {
    "task": {
        "lagged_fibonacci": Option(
            text="Extend a digit string until a 0 appears: long-tailed answers, made on the spot.",
            values={"task": {"name": "lagged_fibonacci"}},
        ),
        "relay": Option(text="A multi-turn environment, made on the spot.", values={"task": {"name": "relay"}}),
        "trail": Option(
            text="Turns with a function tool, made on the spot; for generator=agent, which brings the tool.",
            values={"task": {"name": "trail"}},
        ),
        "dataset": Option(
            text="Your own prompts: task.train_files and task.eval_files.",
            values={"task": {"name": "dataset"}},
            required=("train_files",),
        ),
        "reasoning_gym": Option(
            text="A task of reasoning-gym: task.reasoning_gym.dataset.", values={"task": {"name": "reasoning_gym"}}
        ),
    },
    "policy": {
        "tiny": Option(
            text="A Qwen3 of 0.6M parameters, built and warm-started on the spot; learns a built-in task on two CPU cores.",
            values={
                "policy": {"path": None, "dtype": "float32", "warm_start": {"enabled": True}},
                "engine": {"max_num_seqs": 64, "enforce_eager": True, "start_timeout_s": 300.0},
                "training": {
                    "lr": 8e-4,
                    "adam_beta2": 0.95,
                    "weight_decay": 0.0,
                    "lr_schedule": "linear",
                    "num_warmup_steps": 3,
                    "micro_batch_tokens": 4096,
                    "mixed_precision": False,
                    "activation_checkpointing": False,
                },
                "generator": {"sampling": {"max_tokens": 320}, "agent_timeout_s": 300.0, "rollout_timeout_s": 600.0},
                "trainer": {"policy_mini_batch_size": 8, "num_steps": 100, "num_epochs": 1000},
                "evaluation": {"num_prompts": 256, "num_prompts_while_training": 96, "sampling": {"max_tokens": 320}},
            },
        ),
        "hf": Option(
            text="A local Hugging Face directory: policy.path. The keys' own defaults fit models of 1 to 8 billion parameters.",
            required=("path",),
        ),
    },
    "engine": {
        "vllm": Option(text="vLLM, on GPU or CPU.", values={"engine": {"backend": "vllm"}}),
        "deterministic": Option(
            text="transformers, one request at a time: slow, bit-reproducible.",
            values={"engine": {"backend": "deterministic", "device": "cpu"}},
        ),
    },
    "generator": {
        "gym": Option(
            text="skyrl_gym environments over generate(), in process.", values={"generator": {"kind": "gym"}}
        ),
        "gym_http": Option(
            text="skyrl_gym environments over the endpoint.", values={"generator": {"kind": "gym_http"}}
        ),
        "agent": Option(
            text="Any harness, unmodified, against the endpoint: generator.command or generator.entrypoint.",
            values={"generator": {"kind": "agent"}},
        ),
    },
    "training": {
        "fsdp": Option(text="FSDP2 on any number of ranks.", values={"training": {"backend": "fsdp"}}),
        "deepspeed": Option(
            text="DeepSpeed's ZeRO: training.deepspeed.zero_stage.", values={"training": {"backend": "deepspeed"}}
        ),
    },
}
"""Group -> option -> what it sets; the first option is the default."""


def default_option(group: str) -> str:
    """The option a group takes when the command line names none."""
    return next(iter(GROUPS[group]))
