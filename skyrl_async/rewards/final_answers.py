"""Final answers after ``####``, as in GSM8K.

Flows in: what a policy wrote, and the right number. Flows out: the answer found in it, and whether it is right. This module
does not know rows, environments or mathematics beyond decimal numbers.
"""

import re
from decimal import Decimal, InvalidOperation

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def strict_answer(text: str) -> str | None:
    """Return the first number after a ``####`` of ``text``, as it is written; None without one."""
    found = _MARKED.search(text)
    return found[1] if found else None


def flexible_answer(text: str) -> str | None:
    """Return the last number of ``text``, marked or not; None without one."""
    found = _ANY.findall(text)
    return found[-1] if found else None


def as_number(text: str) -> Decimal | None:
    """Return what ``1,234.50`` or ``$12`` is as a number; None for what is none."""
    try:
        number = Decimal(text.strip().replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def is_right_answer(text: str, ground_truth: str, *, is_flexible: bool = False) -> bool:
    """Whether the final answer of ``text`` is the number ``ground_truth``: ``18``, ``18.0`` and ``$18`` are one.

    The rules of Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021), whose answers follow ``####``.
    """
    answer = flexible_answer(text) if is_flexible else strict_answer(text)
    truth = as_number(ground_truth)
    return answer is not None and truth is not None and as_number(answer) == truth
