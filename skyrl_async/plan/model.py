"""A model of each part of a run, fitted to what was measured, and the simulator's settings that follow from it.

    iteration  seconds = (token + requests * per_request + prefilled tokens * per_token) / speed
    call       seconds = turns * call + (updates * update + tokens * (token + load * per_request) + starts * prefill) / speed
    gradients  seconds = (group + tokens * token) / speed
    the rest   means over the steps

``speed`` is not fitted: it is how trainer and engines of a laptop take each other's cores (``simulator.shared_machine``), and 1 on devices.
Every coefficient is found by least squares and none is negative. Engines that count no iterations leave theirs to the calls, which tell a
prefill from tokens badly: the longer a call, the more of both are in it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skyrl_async.config.rules.placement import sharing_stages
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import Schedule
from skyrl_async.plan.calls import Floats
from skyrl_async.plan.measured import Measured, stages_on_policy_workers
from skyrl_async.plan.memory import Memory, running_requests
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_async.simulator.models import KnownGroup
from skyrl_async.simulator.run import SimulationSettings
from skyrl_async.simulator.shared_machine import ENGINE_CORES, TRAINING_CORES
from skyrl_async.types import PauseMode

_PARTS = (
    "timing/forward_backward",
    "timing/wait_for_groups",
    "timing/wait_for_publish",
    "timing/wait_for_devices",
    "timing/optimizer_step",
    "timing/gather",
)
"""What a step consists of."""
_UPDATE = ("timing/gather", "timing/send", "timing/pause")
"""What a publish consists of, besides ``stage_seconds``."""
_FASTEST = 1e-7
"""Least seconds per token of a lone request: least squares may find 0."""
_RIDGE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Seconds of everything that a run does."""

    config: Config
    """The configuration of the run that was measured, or described."""
    groups: tuple[KnownGroup, ...]
    call_seconds: float = 0.0
    """What each request takes besides its tokens."""
    token_seconds: float
    """What a sampled token takes, of a request alone in an engine."""
    token_seconds_per_request: float
    """What each request that runs in the engine adds to it."""
    prefill_seconds: float = 0.0
    """By which a request holds up all that run in its engine when it begins, or continues after an update."""
    group_seconds: float = 0.0
    """Forward and backward of a group, besides its tokens."""
    gradient_seconds: float
    """What each token of a trained row takes, its prompt counted."""
    shared_cores: int | None = None
    """Cores of the machine that trainer and engines share; None: each has its own devices."""
    unsampled_tokens: float = 0.0
    """Tokens of a row's prompt, and of what its environment answered."""
    step_seconds: float = 0.0
    """An optimizer step of a batch, and its part of what else the batch takes."""
    gather_seconds: float = 0.0
    send_seconds: float = 0.0
    stage_seconds: float = 0.0
    """What else an update takes while engines run: its stage, and until the requests are sent on after it."""
    pause_seconds: float = 0.0
    """For which engines stand still at an update."""
    idle_stage_seconds: float | None = None
    idle_pause_seconds: float | None = None
    """The same of an engine without a request, which nothing has to be fitted in between; None: as long."""
    stages: Mapping[str, float]
    """Stages between the reward and training: name -> seconds per group."""
    memory: Memory


def fit(run: Measured, rng: np.random.Generator | None = None) -> Model:
    """The run's model. ``rng`` draws its steps and groups anew, with replacement (bootstrap), to tell how sure the model is."""
    numbers = np.array([step["step"] for step in run.steps])
    drawn = numbers if rng is None else rng.choice(numbers, len(numbers))
    steps = {step["step"]: step for step in run.steps}

    # The simulation publishes as seldom as the run did, and never waits for a validation.
    published = [number for number in drawn if "timing/publish" in steps[number]]
    published = [number for number in published if number not in run.held_versions] or published or list(drawn)

    def mean(name: str, of: Sequence[int] | NDArray[np.int64] = drawn) -> float:
        return float(np.mean([steps[number].get(name, 0.0) for number in of]))

    def of_publish(name: str) -> float:
        return mean(name, published)

    def alone(name: str, of: Sequence[int] | NDArray[np.int64] = published) -> float:
        return run.shares_alone.get(name, 1.0) * mean(f"timing/{name}", of)

    groups = range(len(run.groups)) if rng is None else rng.choice(len(run.groups), len(run.groups))
    rest = max(0.0, mean("timing/step") - sum(map(mean, _PARTS)))
    stage = max(0.0, of_publish("timing/publish") - sum(map(of_publish, _UPDATE)))
    if run.config.trainer.publishes_between_batches:  # the simulation, too, waits until no group is in flight
        stage = of_publish("timing/stage") + of_publish("timing/acknowledge")
    call, token, per_request, prefill, update = _engine(run, drawn)
    group, gradient = _training(run, drawn)
    return Model(
        config=run.config,
        groups=tuple(run.groups[number] for number in groups),
        call_seconds=call,
        token_seconds=token,
        token_seconds_per_request=per_request,
        prefill_seconds=prefill,
        group_seconds=group,
        gradient_seconds=gradient,
        shared_cores=run.shared_cores,
        unsampled_tokens=run.unsampled_tokens,
        step_seconds=(alone("optimizer_step", drawn) + run.shares_alone.get("optimizer_step", 1.0) * rest)
        / run.config.trainer.steps_per_batch,
        gather_seconds=alone("gather"),
        send_seconds=alone("send"),
        stage_seconds=run.shares_alone.get("stage", 1.0) * stage,
        pause_seconds=alone("pause") + update,
        idle_stage_seconds=run.idle_update.get("stage"),
        idle_pause_seconds=run.idle_update.get("pause"),
        stages=run.stages,
        memory=run.memory,
    )


def _rows_of(steps: NDArray[np.int64], drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the entries of each drawn step; of all steps where those have none."""
    found = np.concatenate([np.flatnonzero(steps == number) for number in drawn])
    return found if len(found) else np.arange(len(steps))


def _engine(run: Measured, drawn: NDArray[np.int64]) -> Floats:
    """Coefficients of a call's seconds: per turn, token, token and request, start, update besides its pause."""
    calls = run.calls
    rows = _rows_of(calls.step, drawn)
    speed, tokens, seconds = calls.speed[rows], calls.num_tokens[rows], calls.seconds[rows] - calls.waiting[rows]
    features = np.stack([speed * calls.num_turns[rows], tokens, tokens * calls.load[rows], calls.num_starts[rows]])
    of_iterations = _iterations(run, drawn, float(np.average(speed, weights=seconds)))
    if of_iterations is None:
        return np.array([*non_negative_least_squares(features.T, speed * seconds), 0.0])
    rest = speed * seconds - of_iterations @ features[1:]
    turn, update = non_negative_least_squares(np.stack([features[0], calls.num_updates[rows]], axis=1), rest)
    return np.array([turn, *of_iterations, update])


def _iterations(run: Measured, drawn: NDArray[np.int64], speed: float) -> Floats | None:
    """Coefficients of the engines' iterations: per token, token and request, start; None where they were not counted."""
    names = ("seconds", "requests", "tokens", "prompts")  # a decode has none of the last two
    steps = {step["step"]: step for step in run.steps}
    found = [
        [steps[number].get(f"engines/{kind}_iteration_{name}", 0.0) for name in names]
        for number in drawn
        for kind in ("decode", "prefill")
        if f"engines/{kind}_iteration_seconds" in steps[number]
    ]
    if not found:
        return None
    seconds, requests, tokens, prompts = np.array(found, float).T
    features = np.stack([np.ones(len(found)), requests, tokens], axis=1)
    token, per_request, per_prefilled_token = non_negative_least_squares(features, speed * seconds)
    return np.array([token, per_request, per_prefilled_token * tokens.sum() / max(1.0, prompts.sum())])


def _training(run: Measured, drawn: NDArray[np.int64]) -> Floats:
    """Coefficients of a group's seconds of training: per group, token."""
    gradients = run.gradients
    rows = _rows_of(gradients.step, drawn)
    features = np.stack([np.ones(len(rows)), gradients.num_tokens[rows]], axis=1)
    return non_negative_least_squares(features, gradients.speed[rows] * gradients.seconds[rows])


def non_negative_least_squares(features: Floats, values: Floats) -> Floats:
    """The coefficients >= 0 that minimise ``|features @ coefficients - values|``, of at most some ten.

    What the values cannot tell apart gets equal parts: a hundredth of the squares of each feature's mean part counts too (ridge).

    The optimum is the plain least squares over its positive coefficients (Lawson and Hanson, *Solving Least Squares Problems*, chapter
    23), so the best of all subsets without a negative coefficient is it.

    Args:
        features: (N, K).
        values: (N,).
    """
    num = features.shape[1]
    features = np.concatenate([features, np.diag(features.mean(axis=0)) * (_RIDGE * len(values)) ** 0.5])
    values = np.concatenate([values, np.zeros(num)])
    best, least = np.zeros(num), float(values @ values)
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(num), k) for k in range(1, num + 1)):
        found = np.linalg.lstsq(features[:, chosen], values, rcond=None)[0]
        left = values - features[:, chosen] @ found
        if (found >= 0).all() and float(left @ left) < least:
            best, least = np.zeros(num), float(left @ left)
            best[list(chosen)] = found
    return best


def settings_of(model: Model, config: Config, *, lengths: float = 1.0) -> SimulationSettings:
    """The simulation of ``config`` with the model's seconds, without an end.

    Data-parallel workers share a group's tokens evenly, and tensor-parallel devices the work of a token, both without loss: nothing that a
    run with one number of them shows tells how much another loses. On a machine that they share they take so many times the cores.

    Args:
        model: of a run, perhaps with another configuration.
        config: that is simulated.
        lengths: factor of every reply's tokens.
    """
    trainer, measured = config.trainer, model.config
    tensor_parallel = measured.engine.tensor_parallel_size / config.engine.tensor_parallel_size
    data_parallel = measured.training.num_workers / config.training.num_workers
    token_seconds = max(_FASTEST, model.token_seconds * tensor_parallel)
    per_request = model.token_seconds_per_request * tensor_parallel
    groups = model.groups
    if lengths != 1:
        groups = tuple(
            replace(
                group,
                samples=tuple(
                    tuple((max(1, round(n * lengths)), seconds) for n, seconds in turns) for turns in group.samples
                ),
            )
            for group in groups
        )
    return SimulationSettings(
        mini_batch_size=trainer.policy_mini_batch_size,
        train_batch_size=trainer.train_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        group_size=config.generator.n_samples_per_prompt,
        max_staleness_steps=trainer.staleness_bound,
        staleness_policy=trainer.staleness_policy.name,
        staleness_window_groups=trainer.staleness_window_groups,
        num_steps=None,
        num_prompts=4096,
        num_workers=trainer.max_concurrent_generation_groups(config.num_group_places),
        count_buffered_as_in_flight=trainer.count_buffered_as_in_flight,
        sample_full_batch=trainer.fully_async.sample_full_batch,
        num_engines=config.engine.num_engines,
        oldest_weight=config.engine.oldest_request_weight,
        tokens_per_second=1 / token_seconds,
        half_speed_requests=token_seconds / per_request if per_request else 1e12,
        max_num_seqs=running_requests(model.memory, config, model.unsampled_tokens + _seen_tokens(groups)),
        prefill_seconds=model.prefill_seconds * tensor_parallel,
        known_groups=groups,
        max_failed_fraction=1.0,
        on_failed_samples=config.generator.on_failed_samples,
        call_seconds=model.call_seconds,
        shared_cores=model.shared_cores,
        engine_cores=ENGINE_CORES / tensor_parallel,
        training_cores=TRAINING_CORES / data_parallel,
        shared_by=sharing_stages(config),
        on_policy_workers=tuple(stages_on_policy_workers(config)),
        min_generation_slice_s=config.placement.min_generation_slice_s,
        block_tokens=1024,
        continues_aborted=True,
        seconds_per_group=model.group_seconds,
        prompt_tokens=model.unsampled_tokens,
        seconds_per_token=model.gradient_seconds * data_parallel,
        step_seconds=model.step_seconds,
        gather_seconds=model.gather_seconds,
        send_seconds=model.send_seconds,
        stage_seconds=model.stage_seconds,
        load_seconds=model.pause_seconds,
        idle_stage_seconds=model.idle_stage_seconds,
        idle_load_seconds=model.idle_pause_seconds,
        double_buffer=config.weight_sync.double_buffer,
        publish_every_steps=trainer.publish_every_steps,
        pause_mode=PauseMode(config.engine.pause_mode.name),
        is_one_step_off=trainer.schedule.name == "one_step_off",
        deterministic=trainer.deterministic,
        stream_mini_batch=_streams(config),
        eval_before_train=False,
        eval_at_end=False,
    )


def _seen_tokens(groups: Sequence[KnownGroup]) -> float:
    """What a running request has sampled, in the mean over time.

    Long answers are seen more often than short ones, at a random time of their lives: E[L^2] / 2 E[L] (the mean age of a renewal process,
    Ross, *Introduction to Probability Models*, chapter 7).
    """
    lengths = np.array([sum(tokens for tokens, _ in turns) for group in groups for turns in group.samples], float)
    return float((lengths**2).mean() / 2 / lengths.mean())


def stage_seconds(model: Model, config: Config, lengths: float) -> dict[str, float]:
    """Seconds per group of the stages between the reward and training, in ``config``: see ``settings_of``."""
    data_parallel = model.config.training.num_workers / config.training.num_workers
    shared = stages_on_policy_workers(config)
    return {
        stage: seconds * lengths * (data_parallel if stage in shared else 1.0)
        for stage, seconds in model.stages.items()
    }


def _streams(config: Config) -> bool:
    """Whether groups are trained as they finish."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    needs_whole_step = (
        algorithm.advantage_batch_normalize
        or trainer.steps_per_batch > 1
        or trainer.schedule is not Schedule.fully_async
        or ADVANTAGE_ESTIMATORS.entry(algorithm.advantage_estimator).needs_mini_batch
        or POLICY_LOSSES.entry(algorithm.policy_loss_type).marker is not None
    )
    return trainer.stream_mini_batch is not False and not needs_whole_step
