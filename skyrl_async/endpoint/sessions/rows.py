"""A session's turns as training rows.

    turn 0 ── turn 1 ── turn 2          row 0: 0 1 2 trained
                 └───── turn 3          row 1: 0 1 context, 3 trained
    turn 4                              row 2: 4 trained (its history was rewritten)
    turn 5                              no row: a side request

Flows in: a turn tree and how the session ended. Flows out: trajectories whose ids, log-probs and versions are those sampled, each
sampled token trained in exactly one of them. Does not know how turns are matched, nor advantages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from skyrl_async.endpoint.sessions.tree import Turn, TurnTree
from skyrl_async.types import ENVIRONMENT_VERSION, FinishReason, Trajectory


class BranchPolicy(StrEnum):
    """Which branches of a session become rows; a branch is the path to a turn that no other turn continues."""

    ALL = "all"
    """Each, in the order in which their last turns were sampled."""
    LONGEST = "longest"
    """The one with the most sampled tokens, the newest of several."""
    LAST = "last"
    """That of the turn sampled last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive response tokens, each with what a trajectory says of it."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """One row to be."""

    path: tuple[Turn, ...]
    first_trained: int
    """Position in ``path``: turns before it are trained in an earlier row."""

    @property
    def trained(self) -> tuple[Turn, ...]:
        return self.path[self.first_trained :]


def rows(
    tree: TurnTree,
    *,
    reward: float,
    branches: BranchPolicy = BranchPolicy.ALL,
    trains_constrained: bool = False,
    trains_side_requests: bool = False,
    metrics: Mapping[str, float] | None = None,
    is_truncated: bool = False,
    is_abandoned: bool = False,
    sample_index: int | None = None,
) -> tuple[Trajectory, ...]:
    """One trajectory per kept branch, with weights that add up to 1. Side requests are no branches, unless they are trained.

    A turn is trained in the first row that contains it and context in the others, whose importance ratios are without it. A turn that a
    grammar constrained is context too, because its log-probs are of the tokens that the grammar left, the trainer's of all; with
    ``trains_constrained`` only its tokens with a log-prob of exactly 0.0, which were forced. A row in which nothing is left to train is
    dropped, unless it would be the only one; an abandoned session's rows are all kept and train nothing. ``num_turns`` and ``num_aborts``
    are of the turns that the row trains, so that their sums are the session's. ``is_truncated`` also where a row's last turn ran out of
    tokens. A tree without turns has no rows.
    """
    left_out = set() if trains_side_requests else set(tree.side_requests)
    kept = _branches([turn for turn in tree.turns if turn not in left_out], branches)
    masks = [[_mask(turn, is_abandoned, trains_constrained) for turn in branch.trained] for branch in kept]
    alive = [i for i, turns in enumerate(masks) if is_abandoned or any(map(any, turns))] or list(
        range(min(1, len(kept)))
    )
    return tuple(
        _row(
            kept[i],
            masks[i],
            reward=reward,
            weight=1 / len(alive),
            metrics=dict(metrics or {}),
            is_truncated=is_truncated or kept[i].path[-1].addition.finish_reason is FinishReason.LENGTH,
            is_abandoned=is_abandoned,
            sample_index=sample_index,
        )
        for i in alive
    )


def _branches(turns: Sequence[Turn], policy: BranchPolicy) -> list[_Branch]:
    continued = {turn.parent for turn in turns}
    paths = [tuple(turn.path()) for turn in turns if turn not in continued]
    if paths and policy is BranchPolicy.LAST:
        paths = paths[-1:]
    elif paths and policy is BranchPolicy.LONGEST:
        paths = [max(paths, key=lambda path: (sum(len(turn.addition.token_ids) for turn in path), path[-1].index))]
    trained: set[Turn] = set()
    kept = []
    for path in paths:
        kept.append(_Branch(path=path, first_trained=sum(turn in trained for turn in path)))
        trained.update(path)
    return kept


def _mask(turn: Turn, is_abandoned: bool, trains_constrained: bool) -> tuple[int, ...]:
    """(T,) 1 for the tokens of the turn that are trained."""
    if is_abandoned or (turn.is_constrained and not trains_constrained):
        return (0,) * len(turn.addition.token_ids)
    if turn.is_constrained:
        return tuple(int(logprob != 0.0) for logprob in turn.addition.logprobs)
    return (1,) * len(turn.addition.token_ids)


def _row(
    branch: _Branch,
    masks: Sequence[tuple[int, ...]],
    *,
    reward: float,
    weight: float,
    metrics: dict[str, float],
    is_truncated: bool,
    is_abandoned: bool,
    sample_index: int | None,
) -> Trajectory:
    pieces = [piece for i, turn in enumerate(branch.path) for piece in _pieces(branch, i, turn, masks)]
    return Trajectory(
        prompt_token_ids=branch.path[0].addition.prompt_token_ids,
        response_token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        loss_mask=tuple(chain.from_iterable(piece.loss_mask for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        versions=tuple(chain.from_iterable(piece.versions for piece in pieces)),
        reward=reward,
        num_turns=len(branch.trained),
        is_truncated=is_truncated,
        num_aborts=sum(turn.addition.num_aborts for turn in branch.trained),
        sample_index=sample_index,
        weight=weight,
        is_abandoned=is_abandoned,
        metrics=metrics,
    )


def _pieces(branch: _Branch, i: int, turn: Turn, masks: Sequence[tuple[int, ...]]) -> list[_Piece]:
    """What turn ``i`` adds to the response: what came before it from elsewhere, then its own tokens."""
    added = turn.addition
    between = [] if i == 0 else [_context(added.prompt_token_ids)]
    if i < branch.first_trained:
        return [*between, _context(added.token_ids)]
    mask = masks[i - branch.first_trained]
    sampled = _Piece(
        token_ids=added.token_ids,
        loss_mask=mask,
        logprobs=tuple(logprob if m else 0.0 for logprob, m in zip(added.logprobs, mask, strict=True)),
        versions=tuple(v if m else ENVIRONMENT_VERSION for v, m in zip(added.versions, mask, strict=True)),
    )
    return [*between, sampled]


def _context(token_ids: tuple[int, ...]) -> _Piece:
    num_tokens = len(token_ids)
    return _Piece(
        token_ids=token_ids,
        loss_mask=(0,) * num_tokens,
        logprobs=(0.0,) * num_tokens,
        versions=(ENVIRONMENT_VERSION,) * num_tokens,
    )
