"""The whole correction: against an enumerated policy under piecewise behavior policies, with each loss, and however rows are split."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyrl_async.algorithms.advantages import make_advantage_estimator
from skyrl_async.algorithms.batching import MicroBatch, Row, collate
from skyrl_async.algorithms.figures import merge_figures
from skyrl_async.algorithms.kl import KL_ESTIMATORS
from skyrl_async.algorithms.losses import make_policy_loss
from skyrl_async.algorithms.objective import Objective
from skyrl_async.algorithms.off_policy import Anchor, OffPolicyCorrection, anchor_of
from skyrl_async.algorithms.settings import CorrectionSettings, LossConstants
from skyrl_async.columns import repeated
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.algorithm import whole_vocabulary_settings
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES
from skyrl_async.training.backends.assembly import make_objective
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.types import Trajectory

CPU = torch.device("cpu")
VOCABULARY, LENGTH = 3, 3
NUM_PREFIXES = sum(VOCABULARY**n for n in range(LENGTH))
SEQUENCES = list(product(range(VOCABULARY), repeat=LENGTH))
UNCAPPED_TOKENS = CorrectionSettings(token_tis=math.inf)
UNCAPPED_SEQUENCES = CorrectionSettings(sequence_tis=math.inf)


def prefix_index(tokens: tuple[int, ...]) -> int:
    """Of the tokens so far, among all prefixes."""
    before = sum(VOCABULARY**n for n in range(len(tokens)))
    return before + sum(token * VOCABULARY**place for place, token in enumerate(reversed(tokens)))


def logits(seed: int) -> Tensor:
    """Of every next token after every prefix: one version of a policy."""
    return torch.randn(NUM_PREFIXES, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs_of(version: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """(LENGTH,) log-probs of the tokens of one sequence."""
    table = version.log_softmax(1)
    return torch.stack([table[prefix_index(sequence[:t]), sequence[t]] for t in range(LENGTH)])


POLICY, OLDER, OLDEST = logits(0), logits(1), logits(2)
REWARDS = {s: r for s, r in zip(SEQUENCES, logits(3).flatten().repeat(3).tolist(), strict=False)}


def behavior_logprobs(sequence: tuple[int, ...], num_oldest: int) -> Tensor:
    """Of a sequence whose first tokens one version sampled, and whose others a later one."""
    return torch.cat([logprobs_of(OLDEST, sequence)[:num_oldest], logprobs_of(OLDER, sequence)[num_oldest:]])


def batch_of(behavior: Tensor, advantages: Tensor, row_indices: Tensor, old: Tensor | None = None) -> MicroBatch:
    """A micro-batch as the objective sees it."""
    unused = torch.zeros_like(row_indices)
    return MicroBatch(
        input_ids=unused.new_zeros((int(row_indices.max()) + 1, 1)),
        positions=unused,
        targets=unused,
        row_indices=row_indices,
        behavior_logprobs=behavior,
        advantages=advantages,
        returns=advantages,
        weights=torch.ones_like(advantages),
        versions=unused,
        ref_logprobs=None,
        old_logprobs=old,
    )


def objective(loss: str = "rollout_is", correction: CorrectionSettings | None = None, **changes: float) -> Objective:
    training = TrainingSettings(policy_path="", policy_loss=loss, correction=correction or CorrectionSettings())
    return make_objective(replace(training, **changes))  # type: ignore[arg-type]


def mean_gradient(what: Objective, num_oldest: int, old: Tensor | None = None) -> Tensor:
    """Of the loss of a sampled sequence, averaged over all of them as the behavior policy samples them."""
    policy = POLICY.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        behavior = behavior_logprobs(sequence, num_oldest)
        advantages = torch.full((LENGTH,), REWARDS[sequence], dtype=torch.float64)
        recomputed = None if old is None else logprobs_of(old, sequence)
        batch = batch_of(behavior, advantages, torch.zeros(LENGTH, dtype=torch.int64), recomputed)
        total = total + behavior.sum().exp() * what(logprobs_of(policy, sequence), batch, None).total
    (gradient,) = torch.autograd.grad(total, policy)
    return gradient


def true_gradient() -> Tensor:
    """Of the expected reward under the policy itself."""
    policy = POLICY.clone().requires_grad_()
    expected = torch.stack([logprobs_of(policy, s).sum().exp() * REWARDS[s] for s in SEQUENCES]).sum()
    (gradient,) = torch.autograd.grad(expected, policy)
    return gradient


@pytest.mark.parametrize("num_oldest", range(LENGTH + 1))
def test_contract_10_uncapped_sequence_weights_estimate_the_true_gradient_under_piecewise_samplers(
    num_oldest: int,
) -> None:
    gradient = mean_gradient(objective(correction=UNCAPPED_SEQUENCES), num_oldest)
    torch.testing.assert_close(gradient, -true_gradient(), atol=1e-9, rtol=0)


def test_contract_10_so_they_do_with_any_proximal_policy_in_between_as_long_as_nothing_is_clipped() -> None:
    """At the proximal policy itself, where its ratio is 1 and the weight is all there is."""
    what = objective("decoupled_ppo", UNCAPPED_SEQUENCES)
    gradient = mean_gradient(what, 1, old=POLICY)
    torch.testing.assert_close(gradient, -true_gradient(), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("estimator", "share"), [("rloo", 1.0), ("dr_grpo", 0.5)])
@pytest.mark.parametrize("nums_oldest", [(0, 0), (1, 1), (2, 2), (0, 3), (2, 1)])
def test_contract_10_so_they_do_with_advantages_of_groups_of_two_whose_samples_are_each_pieced_together(
    nums_oldest: tuple[int, int], estimator: str, share: float
) -> None:
    """Every pair of sequences, weighted by the chance that its samplers give it; dr_grpo has (n - 1) / n of the gradient."""
    of_group = make_advantage_estimator(estimator).compute
    assert of_group is not None
    pairs = list(product(range(len(SEQUENCES)), repeat=2))
    tables = [torch.stack([behavior_logprobs(s, num) for s in SEQUENCES]) for num in nums_oldest]  # (27, LENGTH) each
    behavior = torch.stack([table[pair[place]] for pair in pairs for place, table in enumerate(tables)])
    advantages = torch.tensor(
        [value for pair in pairs for value in of_group([REWARDS[SEQUENCES[index]] for index in pair])],
        dtype=torch.float64,
    )
    rows = torch.arange(2 * len(pairs)).repeat_interleave(LENGTH)
    policy = POLICY.clone().requires_grad_()
    logprobs = torch.stack([logprobs_of(policy, s) for s in SEQUENCES])[torch.tensor(pairs).flatten()]
    batch = batch_of(behavior.flatten(), advantages.repeat_interleave(LENGTH), rows)
    losses = objective(correction=UNCAPPED_SEQUENCES)(logprobs.flatten(), batch, None).tokens.loss
    of_pairs = losses.reshape(len(pairs), 2 * LENGTH).sum(1) / 2
    chances = behavior.sum(1).reshape(len(pairs), 2).sum(1).exp()
    (gradient,) = torch.autograd.grad((chances * of_pairs).sum(), policy)
    torch.testing.assert_close(gradient, -share * true_gradient(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("num_oldest", range(LENGTH + 1))
def test_contract_10_uncapped_token_weights_estimate_the_gradient_of_the_first_order_surrogate(num_oldest: int) -> None:
    """TRPO's: states and what comes of an action are as the sampler has them; only the action is the policy's."""
    policy = POLICY.clone().requires_grad_()
    surrogate = torch.zeros((), dtype=torch.float64)
    for place in range(LENGTH):
        for prefix in product(range(VOCABULARY), repeat=place):
            table = policy.log_softmax(1)[prefix_index(prefix)].exp()
            for action in range(VOCABULARY):
                followers = [s for s in SEQUENCES if s[: place + 1] == (*prefix, action)]
                probabilities = [behavior_logprobs(s, num_oldest) for s in followers]
                reaching = probabilities[0][:place].sum().exp()
                value = sum(
                    p[place + 1 :].sum().exp() * REWARDS[s] for s, p in zip(followers, probabilities, strict=True)
                )
                surrogate = surrogate + reaching * table[action] * value
    (expected,) = torch.autograd.grad(surrogate, policy)
    gradient = mean_gradient(objective(correction=UNCAPPED_TOKENS), num_oldest)
    torch.testing.assert_close(gradient, -expected, atol=1e-9, rtol=0)
    assert (gradient + true_gradient()).abs().max() > 0.01, "for sequences it is biased"


LOSSES = [
    *sorted(POLICY_LOSSES.entries),
    "tests.cpu.own_algorithms:recomputed",
    "tests.cpu.own_algorithms:half_importance",
]


@pytest.mark.parametrize("loss", LOSSES)
def test_truncated_sampling_goes_with_losses_that_then_train_the_policys_own_tokens_of_either_advantage_alike(
    loss: str,
) -> None:
    """Of two tokens of equal log-prob, sampled by the policy itself from 70 % of its mass."""
    logprobs = torch.full((2,), math.log(0.6), requires_grad=True)
    batch = batch_of(
        logprobs.detach() - math.log(0.7), torch.tensor([1.0, -1.0]), torch.tensor([0, 1]), logprobs.detach()
    )
    batch = replace(batch, is_marked=torch.full((2,), loss == "kl_cov"))
    (gradient,) = torch.autograd.grad(objective(loss)(logprobs, batch, None).total, logprobs)
    raised, lowered = (-gradient).tolist()
    if whole_vocabulary_settings(from_overrides(f"trainer.algorithm.policy_loss_type={loss}")):
        assert ":" in loss or abs(raised + lowered) > 1e-3, "refused for nothing"
    else:
        assert raised == pytest.approx(-lowered, abs=1e-6) and raised > 0


@pytest.mark.parametrize("loss", ["rollout_is", "cispo", "decoupled_ppo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_contract_10_under_truncated_sampling_a_weight_gives_the_gradient_of_what_the_kept_tokens_are_worth(
    loss: str, advantage: float
) -> None:
    """Of one token of the policy itself, of which the sampler keeps the likelier two: each is rewarded, or punished, alone."""
    policy = POLICY[:1].clone().requires_grad_()
    table = policy.log_softmax(1)[0]
    kept = table.detach().topk(2).indices
    behavior = table.detach()[kept] - table.detach()[kept].logsumexp(0)
    for token in range(2):
        advantages = torch.zeros(2, dtype=torch.float64).index_fill(0, torch.tensor([token]), advantage)
        batch = batch_of(behavior, advantages * behavior.exp(), torch.tensor([0, 1]), table[kept].detach())
        (found,) = torch.autograd.grad(objective(loss)(table[kept], batch, None).total, policy, retain_graph=True)
        (worth,) = torch.autograd.grad((table[kept].exp() * advantages).sum(), policy, retain_graph=True)
        torch.testing.assert_close(found, -worth, atol=1e-9, rtol=0)


@pytest.mark.parametrize("correction", [UNCAPPED_TOKENS, UNCAPPED_SEQUENCES, CorrectionSettings(token_tis=1.0)])
def test_tokens_of_the_policy_itself_are_weighted_by_1(correction: CorrectionSettings) -> None:
    logprobs = torch.tensor([-0.5, -1.0, -2.0])
    batch = batch_of(logprobs, torch.ones(3), torch.tensor([0, 0, 1]))
    corrected = OffPolicyCorrection(settings=correction, anchor=Anchor.POLICY)(logprobs, batch)
    assert corrected.factors.tolist() == [1.0, 1.0, 1.0]


class TestOnceOnly:
    """A weight never counts what a loss weighs already."""

    def batch(self) -> MicroBatch:
        behavior, old = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.2, -1.0, -0.6, -2.0])
        return batch_of(behavior, torch.tensor([1.0, -0.7, 0.2, 2.0]), torch.tensor([0, 0, 1, 1]), old)

    def total_and_gradient(self, what: Objective) -> tuple[float, Tensor]:
        leaf = torch.tensor([-1.3, -1.1, -0.5, -1.5], requires_grad=True)
        total = what(leaf, self.batch(), None).total
        return total.item(), torch.autograd.grad(total, leaf)[0]

    @pytest.mark.parametrize("loss", ["rollout_is", "decoupled_ppo"])
    def test_token_weights_are_those_that_the_loss_has_by_itself(self, loss: str) -> None:
        total, gradient = self.total_and_gradient(objective(loss, loss_constants=LossConstants(tis_cap=1.5)))
        other_total, other_gradient = self.total_and_gradient(objective(loss, CorrectionSettings(token_tis=1.5)))
        assert total == pytest.approx(other_total, abs=1e-6)
        torch.testing.assert_close(gradient, other_gradient, atol=1e-6, rtol=0)

    def test_the_cap_of_the_loss_gives_way_to_that_of_the_weight(self) -> None:
        correction = CorrectionSettings(token_tis=1.5)
        capped, _ = self.total_and_gradient(
            objective("rollout_is", correction, loss_constants=LossConstants(tis_cap=0.1))
        )
        assert capped == self.total_and_gradient(objective("rollout_is", correction))[0]

    @pytest.mark.parametrize("correction", [UNCAPPED_TOKENS, UNCAPPED_SEQUENCES])
    def test_weights_with_a_loss_anchored_on_the_sampler_are_refused(self, correction: CorrectionSettings) -> None:
        with pytest.raises(ConfigError, match="tis_ratio_type must be null with a policy loss whose ratio"):
            objective("ppo_clip", correction)
        assert anchor_of("ppo_clip") is anchor_of("sapo") is Anchor.BEHAVIOR

    def test_masks_look_at_the_recomputed_policy_where_the_loss_is_anchored_on_it(self) -> None:
        band = CorrectionSettings(token_mask=(0.5, 2.0))
        new = torch.tensor([-1.0, -2.0, -0.5, -0.5])
        of_policy = OffPolicyCorrection(settings=band, anchor=Anchor.BEHAVIOR)(new, self.batch())
        of_old = OffPolicyCorrection(settings=band, anchor=Anchor.OLD)(new, self.batch())
        assert of_policy.is_masked.tolist() == [False, False, False, True]
        assert of_old.is_masked.tolist() == [False, True, False, True]


def test_a_mask_leaves_the_loss_of_other_tokens_and_the_divergence_from_the_reference_as_they_are() -> None:
    logprobs, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.1, -4.0, -0.9])
    batch = batch_of(behavior, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]))
    policy_loss = make_policy_loss("ppo_clip", LossConstants())
    plain = Objective(policy_loss=policy_loss, kl_estimator=KL_ESTIMATORS["k3"], kl_coef=0.1)
    correction = OffPolicyCorrection(settings=CorrectionSettings(token_mask=(0.5, 2.0)), anchor=Anchor.BEHAVIOR)
    reference = torch.tensor([-0.5, -2.0, -1.0])
    before, after = (what(logprobs, batch, reference) for what in (plain, replace(plain, correction=correction)))
    assert after.tokens.loss.tolist() == [before.tokens.loss[0].item(), 0.0, before.tokens.loss[2].item()]
    assert after.ref_kl is not None and before.ref_kl is not None and torch.equal(after.ref_kl, before.ref_kl)
    assert after.total.item() == pytest.approx(before.total.item() - before.tokens.loss[1].item(), abs=1e-6)


def test_a_loss_that_is_no_number_is_not_hidden_by_a_mask() -> None:
    batch = batch_of(torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([0]))
    masking = objective("ppo_clip", CorrectionSettings(token_mask=(0.5, 2.0)))
    assert masking(torch.tensor([math.nan]), batch, None).total.isnan()


EVERYTHING = CorrectionSettings(
    sequence_tis=3.0,
    token_mask=(0.3, 3.0),
    product_mask=(0.05, 20.0),
    geometric_mask=(0.5, 2.0),
    outlier_mask=(0.1, 9.0),
    opsm_delta=0.3,
    m2_threshold=0.4,
)


def random_rows(seed: int, num_rows: int = 8) -> list[Row]:
    """Of different lengths and versions."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        length = draw.randint(1, 6)
        trajectory = Trajectory(
            prompt_token_ids=(1, 2),
            response_token_ids=(3,) * length,
            loss_mask=(1,) * length,
            logprobs=tuple(draw.uniform(-2, -0.5) for _ in range(length)),
            versions=tuple(sorted(draw.randint(0, 3) for _ in range(length))),
            old_logprobs=tuple(draw.uniform(-2, -0.5) for _ in range(length)),
            old_version=3,
            reward=0.0,
        )
        rows.append(Row(trajectory=trajectory, advantages=repeated(draw.uniform(-1, 1), length)))
    return rows


def run_in(
    micro_batches: list[list[int]], rows: list[Row], what: Objective, *, is_packed: bool
) -> tuple[dict[int, Tensor], dict[str, float]]:
    """Gradients per row, and joined figures."""
    gradients, figures = {}, []
    for indices in micro_batches:
        batch = collate([rows[index] for index in indices], CPU, is_packed=is_packed)
        seeds = [torch.Generator().manual_seed(index) for index in indices]
        new = [
            -0.5 - torch.rand(rows[i].trajectory.num_sampled_tokens, generator=g)
            for i, g in zip(indices, seeds, strict=True)
        ]
        leaf = torch.cat(new).requires_grad_()
        loss = what(leaf, batch, None)
        (gradient,) = torch.autograd.grad(loss.total, leaf)
        gradients |= dict(zip(indices, gradient.split([len(part) for part in new]), strict=True))
        assert loss.corrected is not None
        figures.append(loss.corrected.figures(3 - batch.versions))
    return gradients, merge_figures(figures)


@given(
    st.integers(0, 1000), st.permutations(range(8)), st.lists(st.integers(1, 4), min_size=8, max_size=8), st.booleans()
)
def test_how_rows_are_split_laid_out_and_ordered_changes_neither_gradients_nor_figures(
    seed: int, order: list[int], sizes: list[int], is_packed: bool
) -> None:
    rows, what, rest = random_rows(seed), objective("decoupled_ppo", EVERYTHING), iter(order)
    parts = [part for size in sizes if (part := list(islice(rest, size)))]
    split, split_figures = run_in(parts, rows, what, is_packed=is_packed)
    whole, whole_figures = run_in([list(range(8))], rows, what, is_packed=False)
    for index in range(8):
        torch.testing.assert_close(split[index], whole[index], atol=1e-6, rtol=0)
    assert split_figures == pytest.approx(whole_figures, abs=1e-6)


def test_a_forward_without_rows_has_nothing_to_correct() -> None:
    loss = objective("decoupled_ppo", EVERYTHING)(torch.empty(0, requires_grad=True), collate([], CPU), None)
    assert loss.total.item() == 0.0 and loss.corrected is not None and loss.corrected.is_masked.numel() == 0


def singles_of(several: CorrectionSettings) -> Iterator[CorrectionSettings]:
    """Each of the corrections alone."""
    for name in several.__slots__:
        yield CorrectionSettings(**{name: getattr(several, name)})


@given(st.integers(0, 1000), st.randoms(use_true_random=False))
def test_the_factors_of_all_corrections_are_the_product_of_each_in_any_order(seed: int, shuffle: random.Random) -> None:
    batch = collate(random_rows(seed), CPU, is_packed=False)
    logprobs = batch.behavior_logprobs + 0.5 * torch.randn(
        len(batch.versions), generator=torch.Generator().manual_seed(seed)
    )

    def factors(chosen: CorrectionSettings) -> Tensor:
        return OffPolicyCorrection(settings=chosen, anchor=Anchor.POLICY)(logprobs, batch).factors

    singles = [factors(alone) for alone in singles_of(EVERYTHING)]
    shuffle.shuffle(singles)
    multiplied = torch.stack(singles).prod(0)
    torch.testing.assert_close(factors(EVERYTHING), multiplied, atol=1e-6, rtol=0)


def test_figures_count_by_kind_and_by_lag() -> None:
    logprobs, behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, -1.5, 0.0])
    batch = batch_of(behavior, torch.ones(4), torch.tensor([0, 0, 1, 1]))
    chosen = CorrectionSettings(token_tis=1.5, token_mask=(0.5, 5.0), outlier_mask=(0.5, 5.0))
    figures = OffPolicyCorrection(settings=chosen, anchor=Anchor.POLICY)(logprobs, batch).figures(
        torch.tensor([0, 3, 3, 1])
    )
    assert figures == {
        "correction_weight_sum": 0.0,
        "correction_clipped_sum": 2.0,
        "correction_masked_sum": 4.0,
        "correction_masked_token_sum": 2.0,
        "correction_masked_outlier_sum": 4.0,
        "lag0_correction_masked_sum": 1.0,
        "lag0_correction_clipped_sum": 0.0,
        "lag1_correction_masked_sum": 1.0,
        "lag1_correction_clipped_sum": 0.0,
        "lag3_correction_masked_sum": 2.0,
        "lag3_correction_clipped_sum": 2.0,
    }
