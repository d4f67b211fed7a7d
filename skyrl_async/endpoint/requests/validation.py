"""Where a body asks the impossible of the policy's tokenizer, as 400 that names the field.

Flows in: blocks that render, and token ids. Flows out: ``ApiError``. Does not know what is rendered, nor surfaces.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.errors import ConfigError


@contextmanager
def refused_values(param: str) -> Iterator[None]:
    """A ``ValueError`` of the block refuses the request's ``param``.

    A ``ConfigError`` passes: though also a ``ValueError``, it is the chat template's fault and not the client's.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param=param) from error


def known_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> tuple[int, ...]:
    """``token_ids``, all of them in ``[0, vocab_size)``; ``ApiError`` 400 otherwise."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        unknown = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise ApiError(
            400, f"{param} must hold ids in [0, {vocab_size}), got {unknown}", code="invalid_value", param=param
        )
    return tuple(token_ids)


def bad_word_ids(words: Sequence[str], encode: Callable[[str], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that make ``words``, at the beginning and in the middle of a text, as vLLM finds them."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = encode(word.lstrip()), encode(f" {word.lstrip()}")
        if not bare:
            raise ApiError(400, f"bad_words must hold words, got {word!r}", code="invalid_value", param="bad_words")
        found.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return tuple(found)
