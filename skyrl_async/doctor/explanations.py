"""What a gap between recorded log-probs and a model's could come from: each idea predicts the log-probs, and the tokens judge it.

With g the recorded log-probs minus the model's, and d the predicted ones minus the model's, an idea explains the share
1 - sum (g - d)^2 / sum g^2 of the gap: 1 if it predicts every token, 0 or less if it predicts none. Of an idea about older weights the
part c of d that fits best, c = sum g d / sum d^2 in [0, 1], is taken, since the very version may be gone. Beneath larger noise, such as
bfloat16's, such an idea explains little and is still certain where c is near 1 and many standard errors (least squares) from 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_async.doctor.rows import Row, Tokens
from skyrl_async.doctor.scoring import HEAD, Scorer, Values, scores
from skyrl_async.types import SamplingParams

ENOUGH = 0.5
"""Share of a gap from which on an idea is named."""
CERTAIN = 6.0
"""Standard errors from which on an idea about weights is named whatever it explains; some hundred ideas are tried."""
CLEAR = 0.95
"""Share after which dearer ideas are not tried. A temperature can explain 0.7 of the gap of another policy altogether."""
_TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Relative to the configured one."""
_TRUNCATIONS: dict[str, tuple[float, ...]] = {
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99),
    "top_k": (2, 5, 10, 20, 40, 50, 100),
    "min_p": (0.01, 0.02, 0.05, 0.1, 0.2),
}
_OFF: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_MAX_EDITED_ROWS, _MAX_EDITED_TOKENS = 8, 4096
_MAX_BACK = 4
_NEAR_ONE = (0.5, 1.5)
_NEAR = 8
_MAX_INSERTED = 32


@dataclass(frozen=True, slots=True, eq=False)
class Idea:
    """One thing that may be wrong."""

    kind: str
    sentence: str
    predicted: Values
    """(N,) log-probs if it were so; nan for tokens of which it says nothing."""
    is_direction: bool = False
    """Whether a part of the difference may fit."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An idea as the tokens judge it."""

    kind: str
    sentence: str
    explained: float
    """Share of the gap, at most 1."""
    certainty: float = 0.0
    """Standard errors between the fitted part of an idea about weights and 0; 0 where that part is not near 1."""


def judged(idea: Idea, recorded: Values, model: Values) -> Explanation:
    """Judge an idea by tokens: (N,) recorded log-probs, and those of the model; nan where it is unknown."""
    known = ~np.isnan(idea.predicted) & ~np.isnan(model)
    gap, change = (recorded - model)[known], (idea.predicted - model)[known]
    total = float(gap @ gap)
    if total == 0 or not np.isfinite(change).all():
        return Explanation(idea.kind, idea.sentence, 0.0)
    size = max(float(change @ change), 1e-30)
    fitted = float(gap @ change) / size
    part = min(max(fitted, 0.0), 1.0) if idea.is_direction else 1.0
    left = gap - part * change
    explained = 1 - float(left @ left) / total
    is_near = idea.is_direction and _NEAR_ONE[0] <= fitted <= _NEAR_ONE[1]
    error = math.sqrt(float(left @ left) / len(gap) / size)
    return Explanation(idea.kind, idea.sentence, explained, fitted / max(error, 1e-30) if is_near else 0.0)


def best_explanation(families: Sequence[Iterable[Idea]], recorded: Values, model: Values) -> Explanation | None:
    """The idea that explains most of the gap, if it is enough or certain; families of ideas are tried in order."""
    found: list[Explanation] = []
    for family in families:
        found += [judged(idea, recorded, model) for idea in family]
        if max((each.explained for each in found), default=0.0) >= CLEAR:
            break
    best = max(found, key=lambda each: each.explained, default=None)
    if best is not None and best.explained >= ENOUGH:
        return best
    certain = max(found, key=lambda each: each.certainty, default=None)
    return certain if certain is not None and certain.certainty >= CERTAIN else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ideas:
    """Makes ideas about tokens."""

    tokens: Tokens
    model: Values
    """(N,) log-probs under each token's own version; nan where its weights are not there."""
    scorers: Mapping[int, Scorer]
    """Version -> its model."""
    configured: SamplingParams
    """Temperature and truncation."""
    text_of: Callable[[int], str]
    """A token's text and number."""
    starts_without_adapter: bool = False
    """Whether version 0 is a model without its adapter."""
    who: str = "the engine"
    """Whose log-probs are recorded."""

    def only(self, is_chosen: NDArray[np.bool_]) -> "Ideas":
        """Ideas about some of the tokens, (N,)."""
        tokens, rows = self.tokens, np.unique(self.tokens.row[is_chosen])
        is_kept = np.isin(tokens.row, rows)
        chosen = replace(Tokens.of(tokens.rows[row] for row in rows), recorded=tokens.recorded[is_kept])
        return replace(self, tokens=chosen, model=np.where(is_chosen, self.model, np.nan)[is_kept])

    def best(self, *, with_weights: bool = True) -> Explanation | None:
        """What explains the gap of the tokens; cheap ideas are tried first, and those about weights if asked for."""
        of_weights = self._weights() if with_weights else ()
        families = [self._shifts(), self._samplings(), of_weights, self._templates()]
        return best_explanation(families, self.tokens.recorded, self.model)

    def _shifts(self) -> Iterator[Idea]:
        """The log-probs of a row stand one token early or late."""
        for by, where in ((1, "of the token after it"), (-1, "of the token before it")):
            parts = [_shifted(values, by) for values in self.tokens.by_row(self.model)]
            sentence = f"each recorded log-prob is that {where}: a column or the loss mask is shifted by one token"
            yield Idea("shifted mask", sentence, np.concatenate(parts))

    def _samplings(self) -> Iterator[Idea]:
        for name, values in _TRUNCATIONS.items():
            own = getattr(self.configured, name)
            tried = [value for value in dict.fromkeys((own, *values)) if value != _OFF[name]]
            yield from self._sampled_with(name, tried).values()
        # Temperatures: between the best one and its neighbours, twice.
        own = self.configured.temperature
        tried = sorted({1.0, *(own * factor for factor in _TEMPERATURES)})
        known: dict[float, Idea] = {}
        for _ in range(3):
            new = self._sampled_with("temperature", [value for value in tried if value not in known])
            yield from new.values()
            known |= new
            ordered = sorted(known)
            at = min(range(len(ordered)), key=lambda i: self._error(known[ordered[i]]))
            low, high = ordered[max(0, at - 1)], ordered[min(len(ordered) - 1, at + 1)]
            tried = np.linspace(low, high, 9)[1:-1].tolist()

    def _error(self, idea: Idea) -> float:
        return float(np.nansum(np.square(self.tokens.recorded - idea.predicted)))

    def _sampled_with(self, name: str, tried: Sequence[Any]) -> dict[float, Idea]:
        own, plain = getattr(self.configured, name), untruncated(self.configured)
        predicted = scores(self.tokens, self.scorers, [replace(plain, **{name: value}) for value in tried])
        known = {
            value: f"and generator.sampling.{name} is {own:g}" if value != own else "as configured" for value in tried
        }
        said = "" if name == "temperature" else ": log-probs are those of the tokens that it leaves"
        return {
            value: Idea(name, f"{name} {value:.3g} was in force, {known[value]}{said}", values)
            for value, values in zip(tried, predicted, strict=True)
        }

    def _weights(self) -> Iterator[Idea]:
        """Other weights than those of the version that is recorded, or parts of them."""
        first = next(iter(self.scorers.values()))
        if not (is_tied := first.has_tied_head):
            sentence = f"the output head of {self.who} is its input embeddings, and the policy's has weights of its own"
            yield Idea("tied head", sentence, self._changed(lambda own: own.with_part(HEAD, own.tied_head())))
        for stale, old in self.scorers.items():
            others = [str(version) for version in self.scorers if version in self.tokens.version and version != stale]
            if not others:
                continue
            swapped = old.scores(self.tokens, untruncated(self.configured))
            kind, weights = "stale version", f"with weights of version {stale}, or of one on the way there"
            if self.starts_without_adapter and not stale:
                kind, weights = "adapter", "without the adapter, or with an older one"
            sentence = f"{self.who} computed tokens that are recorded as of version {', '.join(others)} {weights}"
            yield Idea(kind, sentence, swapped, is_direction=True)
            for part in first.parts:
                kind, why = "stale weights", ""
                if part == HEAD and is_tied:
                    kind, why = "tied head", ": a tied head that was not updated with the embeddings"
                predicted = self._changed(lambda own, part=part, old=old: own.with_part(part, old.part(part)))  # type: ignore[misc]
                sentence = f"{part} of {self.who} has the weights of version {stale}{why}"
                yield Idea(kind, sentence, predicted, is_direction=True)

    def _changed(self, change: Callable[[Scorer], AbstractContextManager[None]]) -> Values:
        plain = [untruncated(self.configured)]
        return scores(self.tokens, self.scorers, plain, lambda version: change(self.scorers[version]))[0]

    def _templates(self) -> Iterator[Idea]:
        """The engine read one token more, or one less, than was recorded: at each place where sampling began, or at the beginning."""
        shortest = sorted(self.tokens.rows, key=lambda row: len(row.ids))[:_MAX_EDITED_ROWS]
        while len(shortest) > 1 and sum(len(row.ids) for row in shortest) > _MAX_EDITED_TOKENS:
            shortest.pop()
        rows = [row for row in self.tokens.rows if row in shortest]
        begins = [_begins(row.places) for row in rows]
        likely = [token for token, _ in _read(rows, begins).most_common(_MAX_INSERTED)]
        tries = [
            (
                f"{f'{back} tokens' if back else 'right'} before each sampled text",
                [[b - back for b in own if b >= back] for own in begins],
            )
            for back in range(_MAX_BACK)
        ]
        tries += [("at the beginning", [[0]] * len(rows)), ("after the first token", [[1]] * len(rows))]
        for where, at in tries:
            for token in likely:
                said = f"{self.who} read {self.text_of(token)} {where}, which is not recorded"
                yield from self._edited(rows, at, token, said)
            gone = "as the first token" if where == tries[-1][0] else where
            left_out = [[place - 1 for place in own if place] for own in at]
            if any(left_out):
                texts = {self.text_of(int(row.ids[own[0]])) for row, own in zip(rows, left_out, strict=True) if own}
                said = f"{self.who} did not read {' or '.join(sorted(texts)[:3])}, which is recorded {gone}"
                yield from self._edited(rows, left_out, None, said)

    def _edited(self, rows: Sequence[Row], at: list[list[int]], token: int | None, sentence: str) -> Iterator[Idea]:
        """``token`` inserted before each place of the rows; None: the tokens at the places left out."""
        edited = []
        for row, own in zip(rows, at, strict=True):
            moved = np.array([sum(place <= p for place in own) for p in row.places])
            if token is None:
                edited.append(replace(row, ids=np.delete(row.ids, own), places=row.places - moved))
            else:
                edited.append(replace(row, ids=np.insert(row.ids, own, token), places=row.places + moved))
        if any(row.places[0] < 1 for row in edited):
            return
        predicted = np.full(len(self.tokens.row), np.nan)
        is_chosen = np.array([row in rows for row in self.tokens.rows])[self.tokens.row]
        predicted[is_chosen] = scores(Tokens.of(edited), self.scorers, [untruncated(self.configured)])[0]
        yield Idea("template token", sentence, predicted)


def _read(rows: Sequence[Row], begins: Sequence[Sequence[int]]) -> Counter[int]:
    """Tokens that were not sampled, by number; those shortly before a place where sampling began come first."""
    found: Counter[int] = Counter()
    for row, own in zip(rows, begins, strict=True):
        found.update(np.delete(row.ids, row.places).tolist())
        for begin in own:
            found.update(dict.fromkeys(row.ids[max(0, begin - _NEAR) : begin].tolist(), len(row.ids)))
    return found


def _shifted(values: Values, by: int) -> Values:
    found = np.roll(values, -by)
    found[-1 if by > 0 else 0] = np.nan
    return found


def _begins(places: NDArray[np.int64]) -> list[int]:
    """Where sampling began: the prompt's end, and the end of each observation."""
    return [int(p) for i, p in enumerate(places) if i == 0 or places[i - 1] != p - 1]


def untruncated(sampling: SamplingParams) -> SamplingParams:
    """The same temperature, without truncation."""
    return replace(sampling, **_OFF)
