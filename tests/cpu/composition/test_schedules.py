"""What ``trainer.schedule`` comes to: from a configuration to the parts that a run is made of, and what these then do."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skyrl_async.composition.data import Prompts
from skyrl_async.composition.logprobs import LogprobParts
from skyrl_async.composition.parts import Parts, make_trainer
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledGenerator, ModelledPolicy
from skyrl_async.simulator.run import lognormal_length
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import TrainerCallbacks
from skyrl_async.types import PauseMode, Prompt
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.cpu.quick_config import config_of

JOB = (
    "trainer.policy_mini_batch_size=4",
    "trainer.num_steps=10",
    "generator.n_samples_per_prompt=2",
    "trainer.checkpoint_interval_steps=0",
    "trainer.eval_interval_steps=0",
    "evaluation.num_prompts=0",
)
ONE_STEP_OFF = "trainer.schedule=one_step_off"


class Policy(ModelledPolicy):
    """As a run has it: workers that may be replaced, told of checkpoints."""

    num_restarts = 0

    def checkpoint_written(self, directory: Path) -> None:
        """Nothing is kept for the time since the last one."""


def trainer_of(overrides: Sequence[str], logged: list[dict[str, float]], run_dir: Path) -> FullyAsyncTrainer:
    """The trainer that the configuration comes to, over modelled engines and a modelled policy."""
    config, clock = config_of(*JOB, *overrides), asyncio.get_running_loop().time
    lengths = lognormal_length(200.0, 1.0, 0)
    engines = [ModelledEngine(f"engine-{i}", num_tokens_of=lengths, load_seconds=0.1) for i in range(2)]
    client = InferenceEngineClient(engines, max_model_len=10_000)
    policy, trace = Policy(seconds_per_token=5e-4, step_seconds=0.2, send_seconds=0.1), Trace(None, clock)
    train = tuple(Prompt(uid=f"p{i}", messages=(), env_class="modelled") for i in range(80))
    publisher = WeightPublisher(
        client=client,
        policy=policy,
        directory=run_dir / "weights",
        bucket_bytes=1,
        pause_mode=PauseMode.ABORT,
        trace=trace,
        clock=clock,
    )
    parts = Parts(
        prompts=Prompts(train=train, held_out=()),
        client=client,
        generator=ModelledGenerator(client),
        policy=policy,  # type: ignore[arg-type]
        logprobs=LogprobParts(),
        device_groups={},
        publisher=publisher,
    )
    callbacks = TrainerCallbacks(log=lambda step, values: logged.append(values))
    return make_trainer(config, parts, checkpoint_dir=run_dir / "checkpoints", callbacks=callbacks, trace=trace)


def settings(trainer: FullyAsyncTrainer) -> Iterator[tuple[str, object]]:
    """What the trainer and generation were told, as far as a schedule may change it."""
    yield "bound", trainer._run.staleness.max_staleness_steps
    yield "stream_mini_batch", trainer._train_stage._streams
    yield "publishes_between_batches", trainer._config.publishes_between_batches
    for name in ("admits_whole_batches", "limits_buffered_groups"):
        yield name, getattr(trainer._run.staleness, name)
    yield "most groups held", trainer._run.buffer.max_groups


@pytest.mark.parametrize(
    ("overrides", "bound", "streams", "between_batches", "whole_batches", "limits_buffered"),
    [
        ((), 4, True, False, False, True),
        (("trainer.max_staleness_steps=2",), 2, True, False, False, True),
        (("trainer.schedule=sync",), 0, False, False, False, True),
        ((ONE_STEP_OFF,), 1, False, True, True, False),
        (("trainer.deterministic=true",), 4, True, True, False, False),
        ((ONE_STEP_OFF, "trainer.deterministic=true"), 1, False, True, True, False),
    ],
    ids=lambda value: "-".join(value) or "default" if isinstance(value, tuple) else "",
)
async def test_each_schedule_reaches_the_trainer_and_generation(
    overrides: tuple[str, ...],
    bound: int,
    streams: bool,
    between_batches: bool,
    whole_batches: bool,
    limits_buffered: bool,
    tmp_path: Path,
) -> None:
    assert dict(settings(trainer_of(overrides, [], tmp_path))) == {
        "bound": bound,
        "stream_mini_batch": streams,
        "publishes_between_batches": between_batches,
        "admits_whole_batches": whole_batches,
        "limits_buffered_groups": limits_buffered,
        "most groups held": 4 * (bound + 1),
    }


@pytest.mark.parametrize(
    ("overrides", "staleness_max", "is_interrupted"),
    [
        (("trainer.schedule=sync",), 0, False),
        ((ONE_STEP_OFF,), 1, False),
        (("trainer.max_staleness_steps=4",), 4, True),
    ],
    ids=["sync", "one_step_off", "fully_async"],
)
def test_a_composed_run_of_each_schedule_has_its_staleness_and_is_interrupted_in_flight_or_not(
    overrides: tuple[str, ...], staleness_max: int, is_interrupted: bool, tmp_path: Path
) -> None:
    logged: list[dict[str, float]] = []

    async def main() -> None:
        await trainer_of(overrides, logged, tmp_path).run()

    run_in_virtual_time(main())
    steps = [values for values in logged if "async/num_aborts" in values]
    assert len(steps) == 10
    assert max(values["async/staleness_max"] for values in steps) == staleness_max
    assert (sum(values["async/num_aborts"] for values in steps) > 0) == is_interrupted
