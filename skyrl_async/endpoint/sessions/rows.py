"""A session's turns as training rows.

    turn 0 ── turn 1 ── turn 2          row 0: 0 1 2 trained
                 └───── turn 3          row 1: 0 1 context, 3 trained
    turn 4                              row 2: 4 trained (its history was rewritten)
    turn 5                              no row: a side request

Ids, log-probs and versions are those sampled, and each sampled token is trained in at most one row. Does not know how turns are matched,
nor advantages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from skyrl_async.endpoint.sessions.settings import BranchPolicy, SessionOutcome, SessionSettings
from skyrl_async.endpoint.sessions.tree import Turn, TurnTree
from skyrl_async.types import ENVIRONMENT_VERSION, FinishReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive response tokens with their entries in a trajectory."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """One future row."""

    path: tuple[Turn, ...]
    first_trained: int
    """Position in ``path``: turns before it are trained in an earlier row."""

    @property
    def trained(self) -> tuple[Turn, ...]:
        return self.path[self.first_trained :]


def rows(tree: TurnTree, outcome: SessionOutcome, settings: SessionSettings) -> tuple[Trajectory, ...]:
    """One trajectory per kept branch, with weights that add up to 1; none for a tree without turns.

    - Side requests are left out, unless ``trains_side_requests``.
    - A turn is trained in the first row that contains it. It is context in the others, whose importance ratios leave it out.
    - A turn sampled under a grammar is context: its log-probs are of the tokens that the grammar left, the trainer's of all.
      With ``trains_constrained`` only its forced tokens, with a log-prob of exactly 0.0, are.
    - A row without a trained token is dropped, unless it would be the only one. An abandoned session
      keeps all its rows, which train nothing.
    - ``num_turns`` and ``num_aborts`` count the turns that the row trains, so that they add up to the session's.
    - A row whose last turn ran out of tokens is truncated.
    """
    left_out = set() if settings.trains_side_requests else set(tree.side_requests)
    branches = _branches([turn for turn in tree.turns if turn not in left_out], settings.branches)
    masked = [
        (branch, [_mask(turn, outcome.is_abandoned, settings.trains_constrained) for turn in branch.trained])
        for branch in branches
    ]
    kept = [(branch, masks) for branch, masks in masked if outcome.is_abandoned or any(map(any, masks))] or masked[:1]
    return tuple(_row(branch, masks, outcome, weight=1 / len(kept)) for branch, masks in kept)


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
    """(T,) 1 for each token of the turn that is trained, 0 for the others."""
    if is_abandoned or (turn.is_constrained and not trains_constrained):
        return (0,) * len(turn.addition.token_ids)
    if turn.is_constrained:
        return tuple(int(logprob != 0.0) for logprob in turn.addition.logprobs)
    return (1,) * len(turn.addition.token_ids)


def _row(branch: _Branch, masks: Sequence[tuple[int, ...]], outcome: SessionOutcome, *, weight: float) -> Trajectory:
    ran_out = branch.path[-1].addition.finish_reason is FinishReason.LENGTH
    pieces = [piece for i, turn in enumerate(branch.path) for piece in _pieces(branch, i, turn, masks)]
    return Trajectory(
        prompt_token_ids=branch.path[0].addition.prompt_token_ids,
        response_token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        loss_mask=tuple(chain.from_iterable(piece.loss_mask for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        versions=tuple(chain.from_iterable(piece.versions for piece in pieces)),
        reward=outcome.reward,
        num_turns=len(branch.trained),
        is_truncated=outcome.is_truncated or ran_out,
        num_aborts=sum(turn.addition.num_aborts for turn in branch.trained),
        weight=weight,
        is_abandoned=outcome.is_abandoned,
        metrics=dict(outcome.metrics),
    )


def _pieces(branch: _Branch, i: int, turn: Turn, masks: Sequence[tuple[int, ...]]) -> list[_Piece]:
    """What turn ``i`` adds to the response: the context before it, then its own tokens."""
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
