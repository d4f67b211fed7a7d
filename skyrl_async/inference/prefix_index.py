"""Which prefixes of prompts each engine has cached, as far as one client of theirs can know: a state machine without I/O.

    prompt ──> hashes of its prefixes that end with a whole block ──> the longest one that an engine was sent before

An engine drops the blocks that were used longest ago, later ones of a prompt before earlier ones, and at a weight update all of them.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from skyrl_async.columns import TokenIds

BLOCK_TOKENS = 256
"""Tokens per block. Less is computed in a moment, and not worth a thought."""
MAX_TOKENS_PER_ENGINE = 1 << 20
"""Tokens remembered of each engine. One of 80 GB caches some 400,000 of Llama-3 8B: 128 KiB each, beside 16 GB of weights."""

Prefixes = Sequence[int]
"""A hash for each prefix of a prompt that ends with a whole block, the shortest first."""

_weights: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


def prefixes_of(token_ids: TokenIds) -> Prefixes:
    """The prefixes of a prompt. A hash is the sum of its tokens times one random number per position, modulo 2**64."""
    global _weights
    num_tokens = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    if not num_tokens:
        return ()
    if num_tokens > len(_weights):
        _weights = np.random.default_rng(0).integers(1 << 63, size=2 * num_tokens, dtype=np.uint64) * 2 + 1
    sums = np.cumsum((np.asarray(token_ids[:num_tokens], np.uint64) + 1) * _weights[:num_tokens])
    found: list[int] = sums[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist()
    return found


class PrefixIndex:
    """The prefixes that engines were sent, by engine.

    Args:
        max_tokens: remembered of each engine.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS_PER_ENGINE) -> None:
        self._max_blocks = max(1, max_tokens // BLOCK_TOKENS)
        self._engines: dict[int, dict[str, None]] = {}
        """Prefix -> engines that have it."""
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        """Engine -> its prefixes, the least recently used first. A prefix is as recent as each that continues it."""

    def num_blocks(self, engine: str) -> int:
        """Blocks that an engine has."""
        return len(self._blocks.get(engine, ()))

    def num_cached(self, engine: str, prefixes: Prefixes) -> int:
        """Tokens of the longest of these prefixes that an engine has."""
        return BLOCK_TOKENS * _num_known(prefixes, self._blocks.get(engine, {}))

    def longest(self, prefixes: Prefixes) -> tuple[int, Collection[str]]:
        """Tokens of the longest of these prefixes that any engine has, and the engines that have it."""
        num = _num_known(prefixes, self._engines)
        return BLOCK_TOKENS * num, self._engines[prefixes[num - 1]] if num else ()

    def add(self, engine: str, prefixes: Prefixes) -> None:
        """An engine is sent a prompt."""
        if not prefixes:
            return
        blocks = self._blocks.setdefault(engine, OrderedDict())
        for prefix in reversed(prefixes):
            blocks[prefix] = None
            blocks.move_to_end(prefix)
            self._engines.setdefault(prefix, {})[engine] = None
        while len(blocks) > self._max_blocks:
            self._forget(engine, blocks.popitem(last=False)[0])

    def forget(self, engine: str) -> None:
        """An engine's cache is empty. Idempotent."""
        for prefix in self._blocks.pop(engine, ()):
            self._forget(engine, prefix)

    def clear(self) -> None:
        """All caches are empty."""
        self._engines.clear()
        self._blocks.clear()

    def _forget(self, engine: str, prefix: int) -> None:
        engines = self._engines[prefix]
        del engines[engine]
        if not engines:
            del self._engines[prefix]


def _num_known(prefixes: Prefixes, known: Mapping[int, object]) -> int:
    """How many of the prefixes are known, by bisection: with each one all shorter ones are."""
    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high + 1) // 2
        if prefixes[middle - 1] in known:
            low = middle
        else:
            high = middle - 1
    return low
