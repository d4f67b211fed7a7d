"""How the losses of tokens become one: trained rows in, a weight per row and the denominator of their sum out.

Gradients are sums: a loss is ``sum over rows i of w_i * sum over its tokens of l / D``. Both ``w_i`` and a group's part of D depend on that
group alone, and the trainer adds up D over the groups of a step. Hence neither streaming, micro-batches nor ranks change the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedGroup:
    """A group with the weights of its rows."""

    trajectories: tuple[Trajectory, ...]
    """The rows of the group; ``weight`` multiplies the losses of a row's tokens."""
    denominator: float
    """The group's part of the step's denominator, >= 0; 0 if it has no trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How the losses l of tokens become one. Sequence i is a row with n_i trained tokens and weight v_i.

    v_i is 1, so that ``token_mean`` counts every token alike, or with ``splits_samples`` the row's ``weight``: a sample whose history was
    rewritten then counts as one sequence, however many rows it has, and its tokens count less the more rows there are.

    ``token_mean``: ``sum v_i l_it / sum v_i n_i``, DAPO (arXiv 2503.14476), section 3.3.
    ``sequence_mean``: ``sum v_i (sum_t l_it / n_i) / sum v_i``, GRPO (arXiv 2402.03300), equation 3.
    ``seq_mean_token_sum``: ``sum v_i l_it / sum v_i``, the objective of Dr. GRPO (arXiv 2503.20783), section 3.2.
    ``seq_mean_token_sum_norm``: ``seq_mean_token_sum`` over ``max_seq_len``, as Dr. GRPO's code divides.
    ``prompt_mean``: the mean over groups of ``sum v_i l_it / sum v_i n_i`` in each, DAPO's expectation over prompts; the prompt average of
    ScaleRL (arXiv 2510.13786), section 3.2.

    A row without a trained token does not count. Weights that an estimator gives to tokens (``Trajectory.token_weights``) multiply
    ``l_it``, and change no denominator.
    """

    name: str = "token_mean"
    max_seq_len: int | None = None
    """> 0; needed by ``seq_mean_token_sum_norm``."""
    splits_samples: bool = False
    """Whether the rows of a sample share the weight of one."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> WeightedGroup:
        """Weigh all rows of one group."""
        if not self.splits_samples:
            trajectories = [row if row.weight == 1 else replace(row, weight=1.0) for row in trajectories]
        num_tokens = [row.num_sampled_tokens for row in trajectories]
        rows = [(row.weight, num) for row, num in zip(trajectories, num_tokens, strict=True) if num]
        num_sequences = sum(weight for weight, _ in rows)
        num_weighted = sum(weight * num for weight, num in rows)
        weighted = tuple(trajectories)
        match self.name:
            case "token_mean":
                denominator = num_weighted
            case "sequence_mean":
                weighted, denominator = _divided(trajectories, num_tokens), num_sequences
            case "seq_mean_token_sum":
                denominator = num_sequences
            case "seq_mean_token_sum_norm":
                assert self.max_seq_len is not None, "the configuration requires it"
                denominator = num_sequences * self.max_seq_len
            case "prompt_mean":
                weighted = _divided(trajectories, [num_weighted] * len(num_tokens))
                denominator = float(bool(rows))
            case unknown:
                raise ValueError(f"trainer.algorithm.loss_reduction must be one of its names, got {unknown!r}")
        return WeightedGroup(trajectories=weighted, denominator=float(denominator))


def _divided(trajectories: Sequence[Trajectory], by: Sequence[float]) -> tuple[Trajectory, ...]:
    return tuple(
        replace(row, weight=row.weight / divisor) if divisor else row
        for row, divisor in zip(trajectories, by, strict=True)
    )
