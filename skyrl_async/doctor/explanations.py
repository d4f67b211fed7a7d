"""What a gap between recorded log-probs and a model's could come from: each idea predicts the log-probs, and the tokens judge it.

With g the recorded log-probs minus the model's, and d the predicted ones minus the model's, an idea explains the share
1 - sum (g - d)^2 / sum g^2 of the gap: 1 if it predicts every token, 0 or less if it predicts none. Of an idea about older weights the
part c of d that fits best, c = sum g d / sum d^2 in [0, 1], is taken, since the very version may be gone. Beneath larger noise, such as
bfloat16's, such an idea explains little and is still certain where c is near 1 and many standard errors (least squares) from 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from skyrl_async.doctor.rows import Row, Tokens
from skyrl_async.doctor.scoring import HEAD, Scorer
from skyrl_async.types import SamplingParams

Values: TypeAlias = NDArray[np.float64]
ENOUGH = 0.5
"""Share of a gap from which on an idea is named."""
CERTAIN = 6.0
"""Standard errors from which on an idea about weights is named whatever it explains; some hundred ideas are tried."""
_CLEAR = 0.95
"""Share after which dearer ideas are not tried."""
_TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Relative to the configured one."""
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
_TOP_K = (2, 5, 10, 20, 40, 50, 100)
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
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
    """Judge an idea by tokens: (N,) recorded log-probs, and those of the model."""
    known = ~np.isnan(idea.predicted)
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


def best_explanation(
    ideas: Sequence[Iterable[Idea]], recorded: Values, model: Values, taken: NDArray[np.bool_]
) -> Explanation | None:
    """The idea that explains most of the gap of the tokens taken, if it is enough or certain; families of ideas are tried in order."""
    found: list[Explanation] = []
    for family in ideas:
        for idea in family:
            found.append(judged(replace(idea, predicted=idea.predicted[taken]), recorded[taken], model[taken]))
        if max((each.explained for each in found), default=0.0) >= _CLEAR:
            break
    best = max(found, key=lambda each: each.explained, default=None)
    if best is not None and best.explained >= ENOUGH:
        return best
    certain = max(found, key=lambda each: each.certainty, default=None)
    return certain if certain is not None and certain.certainty >= CERTAIN else None


class Ideas:
    """Makes ideas about tokens.

    Args:
        tokens: examined.
        scorers: one per version.
        configured: temperature and truncation.
        model: (N,) log-probs under each token's own version.
        text_of: the text of a token.
        starts_without_adapter: whether version 0 is a model without its adapter.
    """

    def __init__(
        self,
        tokens: Tokens,
        scorers: dict[int, Scorer],
        configured: SamplingParams,
        model: Values,
        text_of: Callable[[int], str],
        *,
        starts_without_adapter: bool = False,
    ) -> None:
        self._tokens = tokens
        self._scorers = scorers
        self._configured = configured
        self._sampling = untruncated(configured)
        self._starts_without_adapter = starts_without_adapter
        self._model = model
        self._text_of = text_of

    def families(self) -> list[Iterator[Idea]]:
        """Ideas, the cheap ones first."""
        return [self._shifts(), self._samplings(), self._weights(), self._templates()]

    def _shifts(self) -> Iterator[Idea]:
        """The log-probs of a row stand one token early or late."""
        for by, where in ((1, "of the token after it"), (-1, "of the token before it")):
            parts = [_shifted(values, by) for values in self._tokens.by_row(self._model)]
            sentence = f"each recorded log-prob is that {where}: a column or the loss mask is shifted by one token"
            yield Idea("shifted mask", sentence, np.concatenate(parts))

    def _samplings(self) -> Iterator[Idea]:
        configured, plain = self._configured, self._sampling
        relative = [configured.temperature * factor for factor in _TEMPERATURES]
        temperatures = sorted({1.0, *relative} - {configured.temperature})
        others = [replace(plain, temperature=t) for t in temperatures]
        others += [replace(plain, top_p=p) for p in dict.fromkeys((configured.top_p, *_TOP_P)) if p < 1]
        others += [replace(plain, top_k=k) for k in dict.fromkeys((configured.top_k, *_TOP_K)) if k > 0]
        others += [replace(plain, min_p=p) for p in dict.fromkeys((configured.min_p, *_MIN_P)) if p > 0]
        ideas = list(self._sampled_with(others))
        yield from ideas
        # Between the best temperature and its neighbours, twice.
        of_temperature = dict(zip(temperatures, ideas, strict=False)) | {
            configured.temperature: Idea("", "", self._model)
        }
        for _ in range(2):
            errors = {t: self._error(idea) for t, idea in of_temperature.items()}
            best = min(errors, key=lambda t: errors[t])
            ordered = sorted(errors)
            at = ordered.index(best)
            low, high = ordered[max(0, at - 1)], ordered[min(len(ordered) - 1, at + 1)]
            between = [float(t) for t in np.linspace(low, high, 9)[1:-1] if t not in of_temperature]
            found = list(self._sampled_with([replace(plain, temperature=t) for t in between]))
            of_temperature |= dict(zip(between, found, strict=True))
            yield from found

    def _error(self, idea: Idea) -> float:
        return float(np.square(self._tokens.recorded - idea.predicted)[self._tokens.is_examined].sum())

    def _sampled_with(self, samplings: Sequence[SamplingParams]) -> Iterator[Idea]:
        for sampling, predicted in zip(samplings, scores(self._tokens, self._scorers, samplings), strict=True):
            yield Idea(*_about(sampling, self._configured), predicted)

    def _weights(self) -> Iterator[Idea]:
        """Other weights than those of the version that is recorded, or parts of them."""
        first = next(iter(self._scorers.values()))
        if not first.has_tied_head:
            sentence = "the engine's output head is its input embeddings, and the trainer's has weights of its own"
            yield Idea("tied head", sentence, self._changed(lambda v: self._scorers[v].with_tied_head()))
        for stale in self._scorers:
            others = [version for version in self._scorers if version != stale]
            if not others:
                continue
            swapped = scores(self._tokens, dict.fromkeys(self._scorers, self._scorers[stale]), [self._sampling])[0]
            adapter = " (the adapter is not in force)" if self._starts_without_adapter and not stale else ""
            about = f"tokens that are recorded as of version {_listed(others)} were sampled"
            yield Idea(
                "stale version",
                f"{about} with weights of version {stale}{adapter}, or of one on the way there",
                swapped,
                True,
            )
            for part in first.parts:
                predicted = self._changed(partial(self._with_part, part=part, stale=stale))
                kind = "tied head" if part == HEAD and first.has_tied_head else "stale weights"
                why = ": a tied head that was not updated with the embeddings" if kind == "tied head" else ""
                yield Idea(kind, f"{part} of the engine has the weights of version {stale}{why}", predicted, True)

    def _with_part(self, version: int, *, part: str, stale: int) -> AbstractContextManager[None]:
        return self._scorers[version].with_part(part, self._scorers[stale])

    def _changed(self, change: Callable[[int], AbstractContextManager[None]]) -> Values:
        return scores(self._tokens, self._scorers, [self._sampling], change)[0]

    def _templates(self) -> Iterator[Idea]:
        """The engine read one token more, or one less, than was recorded: at each place where sampling began, or at the beginning."""
        shortest = sorted(self._tokens.rows, key=lambda row: len(row.ids))[:_MAX_EDITED_ROWS]
        while len(shortest) > 1 and sum(len(row.ids) for row in shortest) > _MAX_EDITED_TOKENS:
            shortest.pop()
        chosen = np.array([row in shortest for row in self._tokens.rows])
        rows = [row for row, is_chosen in zip(self._tokens.rows, chosen, strict=True) if is_chosen]
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
                said = f"the engine read {self._text(token)} {where}, which is not recorded"
                yield from self._edited(chosen, rows, at, token, said)
            gone = "as the first token" if where == tries[-1][0] else where
            left_out = [[place - 1 for place in own if place] for own in at]
            if any(left_out):
                texts = {self._text(int(row.ids[own[0]])) for row, own in zip(rows, left_out, strict=True) if own}
                said = f"the engine did not read {' or '.join(sorted(texts)[:3])}, which is recorded {gone}"
                yield from self._edited(chosen, rows, left_out, None, said)

    def _text(self, token: int) -> str:
        return f"{self._text_of(token)!r} (token {token})"

    def _edited(
        self, chosen: NDArray[np.bool_], rows: Sequence[Row], at: list[list[int]], token: int | None, sentence: str
    ) -> Iterator[Idea]:
        """``token`` inserted before each place of the chosen rows; None: the tokens at the places left out."""
        edited = []
        for row, own in zip(rows, at, strict=True):
            moved = np.array([sum(place <= p for place in own) for p in row.places])
            if token is None:
                edited.append(replace(row, ids=np.delete(row.ids, own), places=row.places - moved))
            else:
                edited.append(replace(row, ids=np.insert(row.ids, own, token), places=row.places + moved))
        if any(row.places[0] < 1 for row in edited):
            return
        predicted = np.full(len(self._tokens.row), np.nan)
        of_edited = scores(Tokens.of(edited, self._scorers), self._scorers, [self._sampling])
        predicted[chosen[self._tokens.row]] = of_edited[0]
        yield Idea("template token", sentence, predicted)


def scores(
    tokens: Tokens,
    scorers: Mapping[int, Scorer],
    samplings: Sequence[SamplingParams],
    change: Callable[[int], AbstractContextManager[None]] = lambda version: nullcontext(),
) -> Values:
    """(S, N) log-probs of all tokens, each by the scorer of its own version; nan where there is none.

    ``change`` changes the scorer of a version meanwhile.
    """
    parts = tokens.by_row(tokens.version)
    found = [np.full((len(samplings), len(versions)), np.nan) for versions in parts]
    for version, scorer in scorers.items():
        with change(version):
            for row, versions, values in zip(tokens.rows, parts, found, strict=True):
                if (is_own := versions == version).any():
                    values[:, is_own] = scorer.logprobs(row.ids, row.places[is_own], samplings)
    return np.concatenate(found, axis=1)


def _read(rows: Sequence[Row], begins: Sequence[Sequence[int]]) -> Counter[int]:
    """Tokens that were not sampled, by number; those shortly before a place where sampling began come first."""
    found: Counter[int] = Counter()
    for row, own in zip(rows, begins, strict=True):
        found.update(np.delete(row.ids, row.places).tolist())
        for begin in own:
            found.update(dict.fromkeys(row.ids[max(0, begin - _NEAR) : begin].tolist(), len(row.ids)))
    return found


def _shifted(values: Values, by: int) -> Values:
    found = np.full(len(values), np.nan)
    if by > 0:
        found[:-by] = values[by:]
    else:
        found[-by:] = values[:by]
    return found


def _begins(places: NDArray[np.int64]) -> list[int]:
    """Where sampling began: the prompt's end, and the end of each observation."""
    return [int(p) for i, p in enumerate(places) if i == 0 or places[i - 1] != p - 1]


def _about(sampling: SamplingParams, configured: SamplingParams) -> tuple[str, str]:
    if sampling.temperature != configured.temperature:
        said = (
            f"temperature {sampling.temperature:.3g}, and generator.sampling.temperature is {configured.temperature:g}"
        )
        return "temperature", f"the engine sampled at {said}"
    for name in ("top_p", "top_k", "min_p"):
        value = getattr(sampling, name)
        if value != getattr(SamplingParams(max_tokens=1), name):
            own = getattr(configured, name)
            known = "as configured" if own == value else f"and generator.sampling.{name} is {own:g}"
            said = f"{name} {value:g} was in force, {known}: log-probs are those of the tokens that it leaves"
            return name, said
    raise ValueError("no difference")


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))


def untruncated(sampling: SamplingParams) -> SamplingParams:
    """The same temperature, without truncation."""
    return replace(sampling, top_p=1.0, top_k=0, min_p=0.0)


def mean_ratio_change(gap: Values) -> float:
    """Mean of |exp(-g) - 1|: how far the gap alone moves importance ratios from 1."""
    return float(np.abs(np.expm1(-gap)).mean()) if len(gap) else math.nan
