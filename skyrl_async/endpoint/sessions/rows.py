"""A session's turns as training rows.

    turn 0 ── turn 1 ── turn 2          row 0: 0 1 2 trained
                 └───── turn 3          row 1: 0 1 context, 3 trained
    turn 4                              row 2: 4 trained (its history was rewritten)
    turn 5                              no row: a side request

Ids, log-probs and versions are those sampled, trained or not, and each sampled token is trained in at most one row. Does not know how
turns are matched, nor advantages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_async.chat.messages import row_messages
from skyrl_async.columns import Logprobs, Mask, Rewards, TokenIds, VersionSpans
from skyrl_async.config.schema.server import BranchPolicyName
from skyrl_async.endpoint.sessions.settings import SessionOutcome, SessionSettings
from skyrl_async.endpoint.sessions.tree import Turn, TurnTree
from skyrl_async.types import ENVIRONMENT_VERSION, FinishReason, RowMessage, Trajectory, TurnSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """One future row: the path to a turn that no other turn continues."""

    path: tuple[Turn, ...]
    masks: tuple[Mask, ...]
    """For each turn, (T,) bool: the sampled tokens that this row trains."""
    own: tuple[Turn, ...]
    """The turns of the path that are in no earlier row."""

    @property
    def is_trained(self) -> bool:
        return any(mask.any() for mask in self.masks)


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
    branches: list[_Branch] = []
    seen: set[Turn] = set()
    for path in _paths([turn for turn in tree.turns if turn not in left_out], settings.branches):
        masks = tuple(_mask(turn, outcome.is_abandoned or turn in seen, settings.trains_constrained) for turn in path)
        branches.append(_Branch(path=path, masks=masks, own=tuple(turn for turn in path if turn not in seen)))
        seen.update(path)
    kept = [branch for branch in branches if outcome.is_abandoned or branch.is_trained] or branches[:1]
    turn_rewards = outcome.turn_rewards(tree.num_turn_tokens)
    token_rewards = outcome.token_rewards(tree.num_turn_tokens)
    return tuple(_row(branch, outcome, turn_rewards, token_rewards, weight=1 / len(kept)) for branch in kept)


def _paths(turns: Sequence[Turn], policy: BranchPolicyName) -> list[tuple[Turn, ...]]:
    """The paths of the branches that ``policy`` keeps, in the order in which their last turns were sampled."""
    continued = {turn.parent for turn in turns}
    paths = [tuple(turn.path()) for turn in turns if turn not in continued]
    if policy is BranchPolicyName.last:
        return paths[-1:]
    if paths and policy is BranchPolicyName.longest:  # the newest of several
        return [max(paths, key=lambda path: (sum(len(turn.addition.token_ids) for turn in path), path[-1].index))]
    return paths


def _mask(turn: Turn, is_context: bool, trains_constrained: bool) -> Mask:
    """(T,) bool: the tokens of the turn that are trained."""
    if is_context or (turn.is_constrained and not trains_constrained):
        return np.zeros(len(turn.addition.token_ids), np.bool_)
    if turn.is_constrained:
        return turn.addition.logprobs != 0.0
    return np.ones(len(turn.addition.token_ids), np.bool_)


def _row(
    branch: _Branch,
    outcome: SessionOutcome,
    turn_rewards: tuple[float, ...],
    token_rewards: Sequence[Rewards],
    *,
    weight: float,
) -> Trajectory:
    """One branch as a row. ``token_rewards`` by turn; empty: none are rewarded by token."""
    spans: list[TurnSpan] = []
    num_before, own = 0, set(branch.own)
    token_ids: list[TokenIds] = []
    loss_mask: list[Mask] = []
    logprobs: list[Logprobs] = []
    versions: list[VersionSpans] = []
    rewards: list[Rewards] = []
    first, last = branch.path[0].addition, branch.path[-1].addition
    for turn, mask in zip(branch.path, branch.masks, strict=True):
        added = turn.addition
        if added is not first:
            between = added.prompt_token_ids
            token_ids.append(between)
            loss_mask.append(np.zeros(len(between), np.bool_))
            logprobs.append(np.zeros(len(between), np.float32))
            versions.append(VersionSpans.constant(ENVIRONMENT_VERSION, len(between)))
            if token_rewards:
                rewards.append(np.zeros(len(between), np.float32))
            num_before += len(between)
        if turn in own:
            spans.append(TurnSpan(index=turn.index, start=num_before, end=num_before + len(added.token_ids)))
        num_before += len(added.token_ids)
        token_ids.append(added.token_ids)
        loss_mask.append(mask)
        logprobs.append(added.logprobs)
        versions.append(added.versions)
        if token_rewards:
            of_turn = token_rewards[turn.index]
            rewards.append(of_turn if turn in own else np.zeros_like(of_turn))
    return Trajectory(
        prompt_token_ids=first.prompt_token_ids,
        response_token_ids=np.concatenate(token_ids),
        loss_mask=np.concatenate(loss_mask),
        logprobs=np.concatenate(logprobs),
        versions=VersionSpans.joined(versions),
        reward=outcome.reward,
        turn_rewards=turn_rewards,
        token_rewards=np.concatenate(rewards) if token_rewards else None,
        turn_spans=tuple(spans),
        num_turns=len(branch.own),
        is_truncated=outcome.is_truncated or last.finish_reason is FinishReason.LENGTH,
        num_aborts=sum(turn.addition.num_aborts for turn in branch.own),
        weight=weight,
        is_abandoned=outcome.is_abandoned,
        metrics=dict(outcome.metrics or {}),
        messages=tuple(_messages(branch.path)),
    )


def _messages(path: Sequence[Turn]) -> Iterator[RowMessage]:
    place = 0
    for turn in path:
        added = turn.addition
        yield from (replace(message, start=place) if place else message for message in turn.before)
        place += len(added.prompt_token_ids)
        of_reply = {name: getattr(added, name) for name in ("engines", "engine_seconds", "asked_at")}
        yield from row_messages([turn.message], place, is_reply=True, **of_reply)
        place += len(added.token_ids)
