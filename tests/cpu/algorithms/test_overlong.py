"""What becomes of answers that are too long, and of rewards that are shaped: masks, baselines, penalties."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.reward_shaping import mask_overlong, overlong_penalty, penalise_overlong, shape_rewards
from skyrl_async.composition.algorithms import reward_shapes
from skyrl_async.composition.parts import check_generator
from skyrl_async.config.load import from_overrides
from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.finished_group_filter import NoSignal, no_signal
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.group_state import from_json, group_to_json
from skyrl_async.samples import Sample, live_samples_of
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group, Trajectory
from tests.cpu.advantage_columns import row_advantages
from tests.cpu.quick_config import config_of


def row(reward: float, num_tokens: int = 1, **columns) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * num_tokens,
        loss_mask=(1,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        versions=(0,) * num_tokens,
        reward=reward,
        **columns,
    )


def group(*rows: Trajectory) -> Group:
    return Group(uid="u", admission_index=0, scheduled_version=0, trajectories=rows)


def centred(rewards: Sequence[float]) -> list[float]:
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


ENDED = [(2,), (0, 2), (1, 2)]
CUT = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""All answers of a policy over three tokens that ends with token 2, or is cut after two."""


def test_the_gradient_of_a_group_with_masked_members_is_that_of_the_mean_reward_of_answers_that_end() -> None:
    """By enumeration of all groups of three: what a cut answer would have earned changes nothing."""
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    reward_of = {(2,): 0.2, (0, 2): 1.0, (1, 2): -0.7, **dict.fromkeys(CUT, -3.0)}

    def logprob(answer: tuple[int, ...]) -> torch.Tensor:
        return torch.log_softmax(logits, 0)[list(answer)].sum()

    def gradient(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, logits)[0]

    scores = {answer: gradient(logprob(answer)) for answer in reward_of}
    chance = {answer: logprob(answer).exp().item() for answer in reward_of}
    assert sum(chance.values()) == pytest.approx(1.0)
    mean, num_degrees = torch.zeros(3, dtype=torch.float64), 0.0
    for answers in itertools.product(reward_of, repeat=3):
        rows = [row(reward_of[a], len(a), is_truncated=a in CUT) for a in answers]
        masked = mask_overlong(group(*rows)).trajectories
        likelihood = torch.tensor([chance[a] for a in answers]).prod().item()
        advantages = row_advantages(masked, centred)
        mean += likelihood * sum(adv * scores[a] for adv, a in zip(advantages, answers, strict=True))
        num_degrees += likelihood * max(0, sum(a in ENDED for a in answers) - 1)
    share_ended = torch.stack([logprob(a).exp() for a in ENDED]).sum()
    mean_of_ended = torch.stack([logprob(a).exp() * reward_of[a] for a in ENDED]).sum() / share_ended
    torch.testing.assert_close(mean, num_degrees * gradient(mean_of_ended), rtol=0, atol=1e-6)


def test_every_row_of_a_cut_sample_is_masked_and_keeps_what_was_sampled() -> None:
    rows = [
        row(1.0, 3, sample_index=0, is_truncated=True, weight=0.5),
        row(1.0, 2, sample_index=0, weight=0.5),
        row(0.0, 2, sample_index=1),
    ]
    masked = mask_overlong(group(*rows)).trajectories
    assert [t.num_sampled_tokens for t in masked] == [0, 0, 2] and [t.is_overlong for t in masked] == [
        True,
        True,
        False,
    ]
    assert [t.logprobs.tolist() for t in masked] == [t.logprobs.tolist() for t in rows]
    assert [sample.reward for sample in live_samples_of(masked)] == [0.0]
    assert mask_overlong(group(*masked)) == group(*masked), "twice is once"
    assert group(*masked).num_wasted_tokens == group(*rows).num_sampled_tokens == 7, "if the group is never trained"


@given(
    num_tokens=st.integers(0, 2000),
    max_tokens=st.integers(1, 1500),
    data=st.data(),
    factor=st.floats(0, 5),
)
def test_the_soft_penalty_is_equation_13_of_dapo(
    num_tokens: int, max_tokens: int, data: st.DataObject, factor: float
) -> None:
    cache = data.draw(st.integers(1, max_tokens))
    if num_tokens <= max_tokens - cache:
        expected = 0.0
    elif num_tokens <= max_tokens:
        expected = ((max_tokens - cache) - num_tokens) / cache
    else:
        expected = -1.0
    found = overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_len=cache, factor=factor)
    assert found == pytest.approx(factor * expected, abs=1e-12)


def test_advantages_are_of_shaped_rewards_and_the_environment_s_stay() -> None:
    penalise = penalise_overlong(max_tokens=10, buffer_len=4, factor=1.0)
    shaped_group = shape_rewards(group(row(1.0, 2), row(1.0, 8), row(0.0, 10)), [penalise])
    assert [t.shaped_reward for t in shaped_group.trajectories] == [1.0, 0.5, -1.0]
    assert [t.reward for t in shaped_group.trajectories] == [1.0, 1.0, 0.0]
    assert row_advantages(shaped_group.trajectories, list) == [1.0, 0.5, -1.0]
    assert shape_rewards(group(row(1.0)), []) == group(row(1.0))


def test_shapes_apply_in_order_to_samples_and_all_their_rows() -> None:
    def double(samples: Sequence[Sample]) -> list[float]:
        return [2 * sample.shaped_reward for sample in samples]

    rows = [row(1.0, 3, sample_index=0), row(0.5, 9, sample_index=1), row(1.0, 10, sample_index=0)]
    found = shape_rewards(group(*rows), [double, penalise_overlong(max_tokens=10, buffer_len=2, factor=1.0)])
    assert [t.shaped_reward for t in found.trajectories] == [1.0, 0.5, 1.0]


def test_a_group_of_a_checkpoint_is_shaped_anew_and_not_twice_and_not_at_all_once_nothing_shapes() -> None:
    penalise = penalise_overlong(max_tokens=10, buffer_len=10, factor=1.0)
    first = shape_rewards(group(row(1.0, 5), row(0.0, 7)), [penalise])
    again = from_json(Group, group_to_json(first))
    assert shape_rewards(again, [penalise]) == first
    assert shape_rewards(again, []) == group(row(1.0, 5), row(0.0, 7))


@pytest.mark.parametrize("rewards", [[1.0], [1.0, float("nan")], [1.0, 2.0, 3.0]])
def test_a_shape_that_returns_something_else_than_a_number_per_sample_is_named(rewards: list[float]) -> None:
    with pytest.raises(
        GenerationError, match=r"reward_shaping must return one finite reward for each of the 2 samples"
    ):
        shape_rewards(group(row(1.0), row(0.0)), [lambda samples: rewards])


def test_a_shape_that_raises_is_named() -> None:
    with pytest.raises(
        GenerationError, match=r"trainer.algorithm.reward_shaping raises KeyError\('steps'\) for the 2 samp"
    ):
        shape_rewards(group(row(1.0), row(0.0)), [by_a_figure_of_the_environment])


def test_a_group_of_right_answers_has_no_signal_whatever_their_lengths_cost() -> None:
    right = shape_rewards(
        group(row(1.0, 2), row(1.0, 9)), [penalise_overlong(max_tokens=10, buffer_len=10, factor=1.0)]
    )
    assert no_signal(right.trajectories, 0.0) is NoSignal.ALL_ONE


class Cutting(ModelledGenerator):
    """Ends answers after so many tokens."""

    def __init__(self, sampler: InferenceEngineClient, max_tokens: int) -> None:
        super().__init__(sampler)
        self.max_tokens = max_tokens

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        sampling = replace(request.sampling, max_tokens=self.max_tokens)
        return await super().generate(replace(request, sampling=sampling))


CUT_OFTEN = SimulationSettings(mean_tokens=100.0, sigma=1.2, group_size=4, num_steps=6, apply_overlong_filtering=True)


def simulate(settings: SimulationSettings, max_tokens: int = 60, record: KeptGroups | None = None) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=lambda client: Cutting(client, max_tokens), record=record)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def logged(simulation: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in simulation.logged if name in values]


def test_cut_answers_are_not_trained_and_the_figures_say_so() -> None:
    record = KeptGroups()
    simulation = simulate(CUT_OFTEN, record=record)
    rows = [row for _, group in record.trained for row in group.trajectories]
    handed = [row for step in simulation.policy.steps for group in step for row in group]
    assert (
        len(handed) == len(rows)
        and sum(row.num_sampled_tokens for row in handed) == simulation.trainer.totals.trained_tokens
    )
    assert all(bool(row.num_sampled_tokens) != row.is_truncated for row in rows)
    totals, share = simulation.trainer.totals, sum(row.is_truncated for row in rows) / len(rows)
    assert 0.2 < share < 0.8
    assert sum(logged(simulation, "generate/overlong_frac")) / 6 == pytest.approx(share)
    assert totals.trained_tokens == sum(row.num_sampled_tokens for row in rows) < totals.generated_tokens
    assert totals.length_ratio < 1, "long answers are lost"


def test_with_dynamic_sampling_every_group_has_a_signal_in_what_is_left_of_it() -> None:
    record = KeptGroups()
    simulation = simulate(replace(CUT_OFTEN, sample_full_batch=True, num_epochs=20), record=record)
    assert len(record.trained) == 6 * CUT_OFTEN.mini_batch_size
    for _, group in record.trained:
        assert {row.reward for row in group.trajectories if not row.is_overlong} == {0.0, 1.0}
    assert simulation.trainer.totals.filtered_by["filtered_too_few"] > 0


def test_a_step_of_which_every_answer_was_cut_is_a_step_without_a_gradient() -> None:
    simulation = simulate(replace(CUT_OFTEN, num_steps=2), max_tokens=1)
    assert simulation.trainer.totals.steps == 2 and simulation.trainer.totals.trained_tokens == 0
    assert logged(simulation, "generate/overlong_frac") == [1.0, 1.0]


def one_more(samples: Sequence[Sample]) -> list[float]:
    """A function of a user's."""
    return [sample.reward + 1 for sample in samples]


def by_a_figure_of_the_environment(samples: Sequence[Sample]) -> list[float]:
    return [sample.rows[0].metrics["steps"] for sample in samples]


def of_one_sample(sample: Sample) -> float:
    return sample.reward + 1


def of_two_arguments(samples: Sequence[Sample], factor: float) -> list[float]:
    return [factor * sample.reward for sample in samples]


def over_their_spread(samples: Sequence[Sample]) -> list[float]:
    return [sample.reward / statistics.pstdev(sample.reward for sample in samples) for sample in samples]


def of_the_first(samples: Sequence[Sample]) -> list[float]:
    return [samples[0].reward]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of_one_sample, "raises AttributeError"),
        (of_two_arguments, "raises TypeError.*missing 1 required positional argument: 'factor'"),
        (over_their_spread, r"raises ZeroDivisionError.* for 2 samples of the rewards \(0.0, 0.0\)"),
        (of_the_first, r"must return one finite reward for each of 2 samples of the rewards .* got \[1.0\]"),
    ],
)
def test_a_shape_that_does_not_shape_is_refused_before_anything_starts(
    function: Callable[..., object], message: str
) -> None:
    name = f"trainer.algorithm.reward_shaping={__name__}:{function.__name__}"
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        check_generator(config_of(name))


@pytest.mark.parametrize("function", [one_more, by_a_figure_of_the_environment])
def test_a_shape_of_one_s_own_passes_its_trial(function: Callable[..., object]) -> None:
    check_generator(config_of(f"trainer.algorithm.reward_shaping={__name__}:{function.__name__}"))


def test_a_configuration_names_a_shape_of_one_s_own_before_the_penalty_for_length() -> None:
    config = from_overrides(
        f"trainer.algorithm.reward_shaping={__name__}:one_more",
        "trainer.algorithm.overlong_buffer_len=4",
        "trainer.algorithm.overlong_buffer_penalty_factor=0.5",
        "generator.max_trajectory_tokens=8",
    )
    found = shape_rewards(group(row(0.0, 3), row(0.0, 6), row(1.0, 8)), reward_shapes(config))
    assert [t.shaped_reward for t in found.trajectories] == [1.0, 0.75, 1.5]
    assert reward_shapes(from_overrides()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.algorithm.overlong_buffer_len=321", "generator.max_turns=1"],
            r"overlong_buffer_len must be <= the longest response, 320 tokens",
        ),
        (
            ["trainer.algorithm.overlong_buffer_len=64"],
            r"max_trajectory_tokens must be set with .*overlong_buffer_len=64 and generator.max_turns=8, got null: "
            r"generator.sampling.max_tokens bounds a turn, not an episode; .* set generator.max_turns=1",
        ),
        (
            [
                "trainer.algorithm.overlong_buffer_len=64",
                "generator.max_trajectory_tokens=1000",
                "generator=agent",
                "generator.command=./agent",
            ],
            r"overlong_buffer_len must be 0 with generator=agent, got 64: .*server.session_max_tokens counts .*reward_shaping",
        ),
        (["trainer.algorithm.overlong_buffer_len=-1"], r"overlong_buffer_len must be >= 0, got -1"),
        (["trainer.algorithm.overlong_buffer_penalty_factor=-1"], r"penalty_factor must be in \[0, inf\), got -1"),
        (
            ["trainer.algorithm.reward_shaping=nowhere"],
            r"reward_shaping must be package.module:function, got 'nowhere'",
        ),
    ],
)
def test_wrong_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_overrides(*overrides)


def test_an_episode_of_several_turns_that_no_limit_came_near_loses_nothing() -> None:
    """Longer than a turn may be, and far from what an episode may be."""
    penalty = ("trainer.algorithm.overlong_buffer_len=64",)
    several = from_overrides(*penalty, "generator.max_trajectory_tokens=1000")
    found = shape_rewards(group(row(1.0, 340), row(0.0, 968)), reward_shapes(several))
    assert [t.shaped_reward for t in found.trajectories] == [1.0, -0.5]
    alone = from_overrides(*penalty, "generator.max_turns=1")
    found = shape_rewards(group(row(1.0, 256), row(1.0, 320)), reward_shapes(alone))
    assert [t.shaped_reward for t in found.trajectories] == [1.0, 0.0]


@pytest.mark.parametrize("path", ["nowhere:shape", "tests.cpu.algorithms.test_overlong:nothing"])
def test_a_shape_that_is_not_there_is_refused_before_anything_starts(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer.algorithm.reward_shaping='{path}' cannot be imported"):
        reward_shapes(from_overrides(f"trainer.algorithm.reward_shaping={path}"))
