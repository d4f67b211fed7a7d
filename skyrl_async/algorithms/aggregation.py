"""Trained rows in; the weight of each row's tokens, and what the sum of all tokens is divided by, out.

Gradients are sums: a loss is ``sum over rows i of w_i * sum over its tokens of l / D``. Both ``w_i`` and a group's part of D depend on that
group alone, and the trainer adds up D over the groups of a step. Hence neither streaming, micro-batches nor ranks change the result. Knows
neither losses nor tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_async.errors import ConfigError
from skyrl_async.types import Trajectory

REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A group as the policy trains it."""

    trajectories: tuple[Trajectory, ...]
    """With the weights of their tokens."""
    denominator: float
    """What the group adds to the step's, >= 0; 0 where it has no trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How the losses l of tokens become one. Sequence i is a row of n_i trained tokens that counts by its ``weight`` v_i.

    ``token_mean``: ``sum v_i l_it / sum v_i n_i``, DAPO (arXiv 2503.14476), section 3.3.
    ``sequence_mean``: ``sum v_i (sum_t l_it / n_i) / sum v_i``, GRPO (arXiv 2402.03300), equation 3.
    ``seq_mean_token_sum``: ``sum v_i l_it / sum v_i``.
    ``seq_mean_token_sum_norm``: the same over ``max_seq_len``, Dr. GRPO (arXiv 2503.20783), section 3.2.
    ``prompt_mean``: the mean over groups of ``sum v_i l_it / sum v_i n_i`` in each.

    A row without a trained token counts nowhere.
    """

    name: str = "token_mean"
    max_seq_len: int | None = None
    """> 0; of ``seq_mean_token_sum_norm``."""

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ConfigError(
                f"trainer.algorithm.loss_reduction must be one of {', '.join(REDUCTIONS)}, got {self.name!r}"
            )

    def __call__(self, trajectories: Sequence[Trajectory]) -> Weighed:
        """The rows of one group, all of them, in order."""
        num_tokens = [row.num_sampled_tokens for row in trajectories]
        rows = [(row.weight, num) for row, num in zip(trajectories, num_tokens, strict=True) if num]
        num_sequences = sum(weight for weight, _ in rows)
        num_weighted = sum(weight * num for weight, num in rows)
        weighed, denominator = tuple(trajectories), num_sequences
        if self.name == "token_mean":
            denominator = num_weighted
        elif self.name == "sequence_mean":
            weighed = _divided(trajectories, num_tokens)
        elif self.name == "seq_mean_token_sum_norm":
            assert self.max_seq_len is not None, "the configuration sees to it"
            denominator = num_sequences * self.max_seq_len
        elif self.name == "prompt_mean":
            weighed = _divided(trajectories, [num_weighted] * len(num_tokens))
            denominator = float(bool(rows))
        return Weighed(trajectories=weighed, denominator=float(denominator))


def _divided(trajectories: Sequence[Trajectory], by: Sequence[float]) -> tuple[Trajectory, ...]:
    return tuple(
        replace(row, weight=row.weight / divisor) if divisor else row
        for row, divisor in zip(trajectories, by, strict=True)
    )
