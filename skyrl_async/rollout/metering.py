"""How many tokens were delivered on behalf of whom, across tasks and seams that need not know of it.

Flows in: completed generations. Flows out: their tokens, for the account that was open where they were asked for: a group's, so
that what it sampled is known when it is given up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_open: ContextVar["TokenAccount | None"] = ContextVar("token_account", default=None)


@dataclass(slots=True)
class TokenAccount:
    """Tokens of completed generations."""

    num_tokens: int = 0


@contextmanager
def charged_to(account: TokenAccount) -> Iterator[None]:
    """Charge what is delivered inside, and in tasks begun inside, to ``account``."""
    token = _open.set(account)
    try:
        yield
    finally:
        _open.reset(token)


def charge(num_tokens: int) -> None:
    """A generation of ``num_tokens`` was delivered to whoever runs now."""
    if account := _open.get():
        account.num_tokens += num_tokens
