"""What a client knows of the prefixes that engines have cached."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import token_ids
from skyrl_async.inference.prefix_index import BLOCK_TOKENS, Prefixes, PrefixIndex, prefixes_of


def prompt(*blocks: int, rest: int = 0) -> Prefixes:
    """Of a prompt whose blocks each repeat one token, with ``rest`` more tokens."""
    return prefixes_of(token_ids(np.repeat([*blocks, 7], [BLOCK_TOKENS] * len(blocks) + [rest]).astype(np.int32)))


@given(
    st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6), st.integers(0, BLOCK_TOKENS - 1)
)
def test_two_prompts_share_the_prefixes_whose_blocks_are_equal(one: list[int], other: list[int], rest: int) -> None:
    num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    shared = set(prompt(*one, rest=rest)) & set(prompt(*other))
    assert shared == set(prompt(*one[:num_shared]))
    assert len(prompt(*one, rest=rest)) == len(one), "the rest is not a block"


def test_blocks_in_another_order_are_another_prefix() -> None:
    assert prompt(0, 1)[-1] != prompt(1, 0)[-1] and prompt(0, 0)[0] != prompt(0, 0)[1]


PROMPTS = st.lists(st.integers(0, 1), max_size=4)
STEPS = st.lists(
    st.tuples(st.sampled_from(["e0", "e1"]), st.one_of(PROMPTS, st.just("forget"), st.just("clear"))), max_size=30
)


@given(steps=STEPS, asked=PROMPTS, max_blocks=st.integers(1, 6))
def test_engines_keep_what_was_used_last_and_the_beginning_of_a_prompt_longest(
    steps: list[tuple[str, Sequence[int] | str]], asked: list[int], max_blocks: int
) -> None:
    index = PrefixIndex(max_blocks * BLOCK_TOKENS)
    kept: dict[str, list[tuple[int, ...]]] = {"e0": [], "e1": []}
    """Engine -> prefixes as tuples, the most recently used first."""
    for engine, step in steps:
        if step == "clear":
            index.clear()
            kept = {name: [] for name in kept}
        elif isinstance(step, str):
            index.forget(engine)
            kept[engine] = []
        else:
            index.add(engine, prompt(*step))
            used = [tuple(step[: i + 1]) for i in range(len(step))]
            kept[engine] = [*used, *(one for one in kept[engine] if one not in used)][:max_blocks]
    lengths = {
        name: max((i + 1 for i in range(len(asked)) if tuple(asked[: i + 1]) in found), default=0)
        for name, found in kept.items()
    }
    assert {name: index.num_blocks(name) for name in kept} == {name: len(found) for name, found in kept.items()}
    assert {name: index.num_cached(name, prompt(*asked)) for name in kept} == {
        name: BLOCK_TOKENS * num for name, num in lengths.items()
    }
    num_longest = max(lengths.values())
    num_tokens, holders = index.longest(prompt(*asked))
    assert num_tokens == BLOCK_TOKENS * num_longest
    assert set(holders) == ({name for name, num in lengths.items() if num == num_longest} if num_longest else set())
