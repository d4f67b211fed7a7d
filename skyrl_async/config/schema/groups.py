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


def _values_of(path: str, **texts: str) -> dict[str, Option]:
    """A group whose options are the values of one key."""
    section, key = path.split(".")
    return {name: Option(text=text, values={section: {key: name}}) for name, text in texts.items()}


GROUPS: dict[str, dict[str, Option]] = {
    "task": _values_of(
        "task.name",
        lagged_fibonacci="Extend a digit string until a 0 appears: long-tailed answers, made on the spot.",
        relay="A multi-turn environment, made on the spot.",
        trail="Turns with a function tool, made on the spot; for generator=agent, which brings the tool.",
        dataset="Your own prompts: task.train_files and task.eval_files.",
        harbor="Directories of Harbor tasks, played as trials: task.harbor.path; for generator=agent generator.harness=NAME.",
        reasoning_gym="A task of reasoning-gym: task.reasoning_gym.dataset.",
    ),
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
                "trainer": {
                    "policy_mini_batch_size": 8,
                    "num_steps": 70,
                    "num_epochs": 1000,
                    "critic": {"optimizer_config": {"lr": 2e-3}},
                },
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
    "generator": _values_of(
        "generator.kind",
        gym="skyrl_gym environments over generate(), in process.",
        gym_http="skyrl_gym environments over the endpoint.",
        agent="Any harness, unmodified, against the endpoint: generator.harness, generator.command or generator.entrypoint.",
    ),
    "training": _values_of(
        "training.backend",
        fsdp="FSDP2 on any number of ranks.",
        deepspeed="DeepSpeed's ZeRO: training.deepspeed.zero_stage.",
    ),
}
"""Group -> option -> what it sets; the first option is the default."""


def default_option(group: str) -> str:
    """The option a group takes when the command line names none."""
    return next(iter(GROUPS[group]))
