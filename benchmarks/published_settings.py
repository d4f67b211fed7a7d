"""What others have published of asynchronous training, as data: the synchronous row, and the figure to compare with.

Every number is from the source that stands beside it. ``assumed`` says what the model needs and no source tells.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

ASYNC_RL = "async-rl, README of the state-machine pipeline over verl, table time_per_step(s)"
FULLY_ASYNC = "verl documentation, Recipe: Fully Async Policy Trainer"
ONE_STEP_OFF = "verl documentation, Recipe: One Step Off Policy Async Trainer, Experimental Results"
PARTIAL = "verl-recipe pull request 58, README of the Async Partial Rollout Trainer, section 1.3"
NEMO = "NeMo RL, docs/about/performance-summary.md, v0.6, and its recipes for the batch and the devices"
MARIN = (
    "marin, issues 8955 (8,524 to 4,301 s with copies, then 6,235 to 2,942 s; sixteen inference GPUs) and 8936 (the "
    "synchronous arm of 25 updates, 67B-A2B), pull request 9256 (128 prompts, four answers, 192 workers, 4,096 tokens at most), issue 9171 "
    "(3.1 to 3.6 s of sync in the second)"
)
AREAL = "AReaL, arXiv 2505.24298 v5, Tables 1 and 3, sections 5.1 and 7.1 (read in a transcript of the paper)"


class Schedule(Enum):
    """Whose schedule is modelled."""

    ONE_STEP_OFF = "one_step_off"
    """verl: the next whole batch is generated while this one is trained."""
    ASYNC_RL = "async_rl"
    """Whole batches through stages, one ahead; reference log-probs on the devices of training."""
    ASYNC_RL_REFERENCE = "async_rl_reference"
    """The same, reference log-probs on devices of their own."""
    PARTIAL = "partial"
    """Synchronous; engines are kept full, and what is unfinished when the batch is full goes on in the next step."""
    FULLY_ASYNC = "fully_async"
    """verl: a stream, at most ``1 + staleness_threshold`` batches generated between two updates."""
    AREAL = "areal"
    """The capacity rule alone, whole batches in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """One synchronous step, in seconds, all devices in each phase unless the setting says otherwise."""

    generate_s: float
    update_s: float
    old_logprobs_s: float = 0.0
    """Recomputed by the trainer: a loss anchored on the engine's log-probs goes without."""
    reference_s: float = 0.0
    switch_s: float = 0.0
    """Of devices that change hands between generation and training."""
    other_s: float = 0.0
    """The rest of the step; taken to be the same on any number of devices."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, phase.name) for phase in fields(self)))

    def of_length(self, step_s: float) -> "Synchronous":
        """The same shares of a step of another length."""
        factor = step_s / self.step_s
        return Synchronous(**{phase.name: getattr(self, phase.name) * factor for phase in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One published comparison."""

    system: str
    setting: str
    source: str
    schedule: Schedule
    devices: int
    devices_per_engine: int
    generation_devices: int | None
    """Of the asynchronous run; None: not published, or all take turns."""
    groups: int
    group_size: int
    half_speed_requests: float
    """In one engine; see ``half_speed_requests`` below."""
    synchronous: Synchronous
    published_step_s: float | None
    """Of the asynchronous row."""
    published_total_speedup: float | None = None
    """In time to the end of the run, where that is published too."""
    sigma: float = 0.8
    longest_over_mean: float = 8.0
    bound: int = 1
    """``max_staleness_steps`` of ours: that of the system, or 4 where it has none."""
    staleness_threshold: float = 1.0
    """Of ``Schedule.FULLY_ASYNC``."""
    update_on: Mapping[int, float] = field(default_factory=dict)
    """Devices -> seconds of the update in the synchronous row of so many; others: in proportion."""
    is_balanced: bool = False
    """The synchronous row has no phases, and its engines and trainer have devices of their own that take turns: training is as long
    as generation by engines that are always full."""
    assumed: str = ""

    @property
    def published_speedup(self) -> float | None:
        """In seconds per step."""
        return None if self.published_step_s is None else self.synchronous.step_s / self.published_step_s

    @property
    def num_engines(self) -> int:
        """With every device generating."""
        return self.devices // self.devices_per_engine

    def phases_gone(self, *, is_ours: bool) -> list[str]:
        """Phases of the synchronous row that the schedule, or ours, does without."""
        takes_turns = self.schedule is Schedule.PARTIAL and not is_ours
        needs_old = self.schedule not in (Schedule.FULLY_ASYNC, Schedule.AREAL) and not is_ours
        gone = {
            "recomputed log-probs": 0.0 if needs_old else self.synchronous.old_logprobs_s,
            "devices changing hands": 0.0 if takes_turns else self.synchronous.switch_s,
        }
        return [f"{phase} ({seconds:.0f} s)" for phase, seconds in gone.items() if seconds]

    def training_s(self, devices: int, *, has_old_logprobs: bool) -> float:
        """Of a step on so many devices, without what is the same on any number of them."""
        sync, factor = self.synchronous, self.devices / devices
        old = sync.old_logprobs_s if has_old_logprobs else 0.0
        return self.update_on.get(devices, sync.update_s * factor) + (old + sync.reference_s) * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Published runs that differ in the staleness bound, or in engines, and share everything else."""

    system: str
    setting: str
    source: str
    groups: int
    group_size: int
    num_workers: int | None
    """Groups in flight at S > 0; None: as many as the bound allows."""
    training_share: float
    """Of the S = 0 step without what is the same in every run."""
    step_s: Mapping[tuple[int, int], float]
    """(S, engines) -> published seconds per step. That of S = 0 and one engine fixes the scale."""
    other_s: Mapping[int, float]
    """S -> seconds of each step in which neither side works, and which are given: copies of weights."""
    longest_over_mean: float
    half_speed_requests: float = 170.0
    sigma: float = 0.8
    assumed: str = ""


def half_speed_requests(parameters: float, layers: int, kv_heads: int, mean_tokens: float) -> float:
    """Requests at which each runs at half speed, where decoding is bound by what is read from memory per token.

    That is the weights once, and the keys and values of every request: two of 128 numbers per layer and head, all in two bytes.
    """
    return parameters * 2 / (layers * kv_heads * 128 * 2 * 2 * mean_tokens)


def _seconds(text: str) -> float:
    """Of ``67h34m``."""
    hours, minutes = text.removesuffix("m").split("h")
    return int(hours) * 3600 + int(minutes) * 60


def _qwen_7b(longest_tokens: int) -> float:
    return half_speed_requests(7.6e9, 28, 4, longest_tokens / 8)


def _qwen3_4b(longest_tokens: int) -> float:
    return half_speed_requests(4.0e9, 36, 8, longest_tokens / 8)


_TAIL = "a lognormal tail (sigma 0.8), a mean of an eighth of the longest answer"

_MOE_ROW = Synchronous(generate_s=348.05, update_s=86.27, old_logprobs_s=28.73, reference_s=20.86, other_s=13.98)
"""verl, Qwen3-30B-A3B-Base with GRPO, colocated on 128 GPUs, 497.89 s (30B Model Mode Experiment)."""

_MATH_20K = Synchronous(generate_s=247, switch_s=74, old_logprobs_s=88, update_s=286, other_s=54)
_MATH_8K = Synchronous(generate_s=162, switch_s=45, old_logprobs_s=119, update_s=344, other_s=29)


def _async_rl(devices: int, sync_s: float, async_s: float | None, *, is_reference_apart: bool = False) -> Setting:
    name = ", reference log-probs apart" if is_reference_apart else ""
    return Setting(
        system="async-rl",
        setting=f"Red-MoE-16B, {devices} GPUs{name}",
        source=ASYNC_RL,
        schedule=Schedule.ASYNC_RL_REFERENCE if is_reference_apart else Schedule.ASYNC_RL,
        devices=devices,
        devices_per_engine=2,
        generation_devices=None,
        groups=256,
        group_size=8,
        half_speed_requests=170.0,
        synchronous=_MOE_ROW.of_length(sync_s),
        published_step_s=async_s,
        assumed="the step's phases (those of verl's row for Qwen3-30B-A3B), 2,048 answers as 256 groups of 8, "
        f"the split (a quarter, half or three quarters generate: the fastest in the model), half speed at 170 requests, {_TAIL}",
    )


def _verl_7b(
    devices: int, sync: Synchronous, async_s: float, total: float, *, half_update_s: float | None = None
) -> Setting:
    return Setting(
        system="verl fully async",
        setting=f"Qwen2.5-Math-7B, 28k, {devices} GPUs",
        source=FULLY_ASYNC + ", Asynchronous Training on 7B Model; batch and engines of dapo_7b_math_fsdp2_64_64.sh",
        schedule=Schedule.FULLY_ASYNC,
        devices=devices,
        devices_per_engine=4,
        generation_devices=devices // 2,
        groups=512,
        group_size=16,
        half_speed_requests=_qwen_7b(28 * 1024),
        synchronous=sync,
        published_step_s=async_s,
        published_total_speedup=total,
        staleness_threshold=0.5,
        update_on={} if half_update_s is None else {devices // 2: half_update_s},
        assumed=_TAIL,
    )


def _one_step_off(engine: str, longest_tokens: int, sync: Synchronous, async_s: float, total: float) -> Setting:
    return Setting(
        system="verl one-step-off",
        setting=f"Qwen2.5-Math-7B, {engine}, 16 GPUs",
        source=ONE_STEP_OFF + "; batch and engines of dapo_7b_math_fsdp2_4_12.sh",
        schedule=Schedule.ONE_STEP_OFF,
        devices=16,
        devices_per_engine=2,
        generation_devices=4,
        groups=512,
        group_size=12,
        half_speed_requests=_qwen_7b(longest_tokens),
        synchronous=sync,
        published_step_s=async_s,
        published_total_speedup=total,
        assumed=_TAIL,
    )


def _partial(
    name: str,
    longest_tokens: int,
    sync: Synchronous,
    *,
    sigma: float,
    step_s: float | None = None,
    total_speedup: float | None = None,
) -> Setting:
    return Setting(
        system="partial rollouts",
        setting=f"Qwen3-4B, {name}, 16 GPUs",
        source=PARTIAL,
        schedule=Schedule.PARTIAL,
        devices=16,
        devices_per_engine=2,
        generation_devices=None,
        groups=128,
        group_size=8,
        half_speed_requests=_qwen3_4b(longest_tokens),
        synchronous=sync,
        published_step_s=step_s,
        published_total_speedup=total_speedup,
        sigma=sigma,
        bound=4,
        assumed="the step's phases (those of verl's one-step-off row on the same machines), 128 groups of 8, engines of 2 GPUs, "
        f"a mean of an eighth of the longest answer, sigma {sigma}, the split of ours (the fastest quarter, half or three quarters)",
    )


def _nemo(
    name: str, gpus: int, engine: int, groups: int, longest_over_mean: float, sync_s: float, async_s: float
) -> Setting:
    return Setting(
        system="NeMo RL",
        setting=f"{name}, {2 * gpus} GPUs",
        source=NEMO,
        schedule=Schedule.AREAL,
        devices=2 * gpus,
        devices_per_engine=engine,
        generation_devices=gpus,
        groups=groups,
        group_size=512 // groups,
        half_speed_requests=170.0,
        synchronous=Synchronous(generate_s=0.0, update_s=sync_s),
        published_step_s=async_s,
        longest_over_mean=longest_over_mean,
        is_balanced=True,
        assumed=f"the synchronous row is that of {gpus} GPUs, where generation and training take turns; training is as long as "
        "generation by full engines, engines are those of the synchronous row, half speed at 170 requests, sigma 0.8",
    )


SETTINGS = (
    _async_rl(8, 950, None),
    _async_rl(16, 500, 270),
    _async_rl(32, 260, 170),
    _async_rl(32, 260, 140, is_reference_apart=True),
    Setting(
        system="AReaL",
        setting="R1-Distill-Qwen-1.5B, 27k, 128 GPUs",
        source=AREAL + "; mean of 5,500 tokens: DeepScaleR blog, the same model at the start of training",
        schedule=Schedule.AREAL,
        devices=128,
        devices_per_engine=1,
        generation_devices=96,
        groups=512,
        group_size=16,
        half_speed_requests=half_speed_requests(1.78e9, 28, 2, 5500),
        synchronous=Synchronous(generate_s=0.0, update_s=41.0 * 3600 / 250),
        published_step_s=14.8 * 3600 / 250,
        published_total_speedup=41.0 / 14.8,
        longest_over_mean=27648 / 5500,
        bound=8,
        is_balanced=True,
        assumed="Sync.AReaL takes turns on the same 75:25 split of devices, training is as long as generation by full engines "
        "(the split was chosen for throughput), one GPU per engine, sigma 0.8",
    ),
    _partial(
        "GSM8K, 1k",
        1024,
        _MATH_8K.of_length(_seconds("4h59m") / 290),
        step_s=_seconds("4h24m") / 280,
        total_speedup=_seconds("4h59m") / _seconds("4h24m"),
        sigma=0.5,
    ),
    _partial(
        "DAPO-Math-17k, 18k",
        18384,
        _MATH_20K.of_length(_seconds("67h34m") / 200),
        step_s=_seconds("33h02m") / 110,
        total_speedup=_seconds("67h34m") / _seconds("33h02m"),
        sigma=0.8,
    ),
    _partial("a 160k tail (3 % above 80k)", 160_000, _MATH_20K.of_length(_seconds("67h34m") / 200), sigma=1.0),
    _verl_7b(
        32,
        Synchronous(generate_s=357.41, old_logprobs_s=107.71, update_s=313.81, other_s=11.17),
        294.77,
        _seconds("89h05m") / _seconds("33h26m"),
    ),
    _verl_7b(
        64,
        Synchronous(generate_s=150.72, old_logprobs_s=70.26, update_s=133.41, other_s=10.89),
        189.26,
        _seconds("41h32m") / _seconds("21h40m"),
        half_update_s=313.81,
    ),
    _verl_7b(
        128,
        Synchronous(generate_s=177.85, old_logprobs_s=53.92, update_s=113.81, other_s=10.72),
        150.63,
        _seconds("40h48m") / _seconds("17h22m"),
        half_update_s=133.41,
    ),
    Setting(
        system="verl fully async",
        setting="Qwen2.5-7B, multi-turn, 32 GPUs",
        source=FULLY_ASYNC + ", Multi-Turn Tool Calling; 16 answers and 4 GPUs per engine of dapo_7b_async_retool.sh",
        schedule=Schedule.FULLY_ASYNC,
        devices=32,
        devices_per_engine=4,
        generation_devices=16,
        groups=64,
        group_size=16,
        half_speed_requests=_qwen_7b(16384),
        synchronous=Synchronous(generate_s=228.03, old_logprobs_s=35.19, update_s=111.84, other_s=0.41),
        published_step_s=221.36,
        published_total_speedup=_seconds("22h28m") / _seconds("14h04m"),
        assumed=f"turns and tools as one answer without a pause, {_TAIL}",
    ),
    _one_step_off("FSDP2, 20k", 20480, _MATH_20K, 520, _seconds("19h18m") / _seconds("15h34m")),
    _one_step_off("Megatron, 8k", 8192, _MATH_8K, 566, _seconds("18h21m") / _seconds("13h06m")),
    _nemo("DeepSeek V3, H100", 256, 32, 32, 1536 / 701, 134, 64.1),
    _nemo("Qwen3-235B, H100", 128, 16, 16, 8192 / 5698, 395, 231),
    _nemo("DeepSeek V3, GB200", 128, 32, 32, 1536 / 711, 108, 61.7),
    _nemo("Qwen3-235B, GB200", 64, 8, 16, 8192 / 5709, 286, 278),
)


_MARIN_SHARE = (_MOE_ROW.update_s + _MOE_ROW.old_logprobs_s + _MOE_ROW.reference_s) / _MOE_ROW.step_s
_MARIN_ASSUMED = (
    "half speed at 170 requests, sigma 0.8, answers cut at 3.4 times their mean (1,197 tokens in the synchronous arm of 8936), copies stop "
    "both sides, groups past the allowance wait instead of being thrown away"
)


def _marin(name: str, step_s: Mapping[int, float], other_s: Mapping[int, float]) -> Sweep:
    return Sweep(
        system="marin",
        setting=name,
        source=MARIN,
        groups=128,
        group_size=4,
        num_workers=192,
        training_share=_MARIN_SHARE,
        step_s={(bound, 1): seconds / 100 for bound, seconds in step_s.items()},
        other_s=other_s,
        longest_over_mean=4096 / 1197,
        assumed=f"training takes {100 * _MARIN_SHARE:.0f} % of the rest of a step, as in verl's Qwen3-30B-A3B row; {_MARIN_ASSUMED}",
    )


SWEEPS = (
    _marin("67B-A2B, 32 + 8 GPUs", {0: 6235, 1: 4360, 2: 3544, 3: 3142, 4: 2942}, dict.fromkeys(range(5), 3.35)),
    _marin(
        "67B-A2B, 32 + 8 GPUs, before its faster copies",
        {0: 8524, 1: 5583, 2: 5093, 3: 4754, 4: 4301},
        {0: 21.41, 1: 20.68, 2: 20.92, 3: 20.96, 4: 20.66},
    ),
    Sweep(
        system="marin",
        setting="67B-A2B, 32 prompts, 32 + 8 and 32 + 16 GPUs",
        source=MARIN,
        groups=32,
        group_size=4,
        num_workers=None,
        # 21.9 % of 866.5 s in 24 updates of its asynchronous arm
        training_share=0.219 * 866.5 / 24 / (1652.8 / 25 - 0.562 * 866.5 / 24),
        step_s={(0, 1): 1652.8 / 25, (1, 1): 1182.2 / 25, (1, 2): 1182.2 / 25 * (1 - 0.042)},
        other_s=dict.fromkeys(range(2), 0.562 * 866.5 / 24),
        longest_over_mean=4096 / 1197,
        assumed="training and copies take the seconds of its asynchronous arm; sixteen GPUs save the share of eight's time that a later "
        f"pair of runs did (4.2 %); {_MARIN_ASSUMED}",
    ),
)
"""Runs over the staleness bound, predicted from the first of each."""
