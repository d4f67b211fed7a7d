"""How many tokens were sampled on behalf of whom, across tasks and seams that need not know of it.

Flows in: generations that have ended or were cut off. Flows out: their tokens, for the account that was open where they were asked
for: a group's, so that what it sampled is known when it is given up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_open: ContextVar["TokenUsage | None"] = ContextVar("token_account", default=None)


@dataclass(slots=True)
class TokenUsage:
    """What was sampled for one purpose."""

    num_tokens: int = 0
    """Of completed generations."""
    num_cut_off_tokens: int = 0
    """Of generations that were cut off, and that may still be gone on with."""


@contextmanager
def recording_tokens_to(account: TokenUsage) -> Iterator[None]:
    """Charge what is delivered inside, and in tasks begun inside, to ``account``."""
    token = _open.set(account)
    try:
        yield
    finally:
        _open.reset(token)


def record_tokens(num_tokens: int) -> None:
    """A generation of ``num_tokens`` was delivered to whoever runs now."""
    if account := _open.get():
        account.num_tokens += num_tokens


def record_cut_off(num_tokens: int) -> None:
    """A generation was cut off after ``num_tokens``."""
    if account := _open.get():
        account.num_cut_off_tokens += num_tokens


def record_wasted() -> None:
    """Nobody goes on with what was cut off so far."""
    if account := _open.get():
        account.num_cut_off_tokens = 0
