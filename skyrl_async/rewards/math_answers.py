r"""Mathematical answers in ``\boxed{}``, and when two of them are equal.

Two answers are equal if they are the same text once layout is taken away (spaces, ``\left``, ``\dfrac``, ``\text{}``, units,
``x=``); or the same rational number, computed exactly from decimals, fractions, percents and powers of ten; or, for lists,
tuples and sets, if their parts are.

Flows in: what a policy wrote, and the right answer. Flows out: the answer found in it, and whether they are equal. Linear in the
length of the texts: nothing is evaluated. This module does not know rows or environments.
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 500
"""Longer answers equal nothing: they are no final answers."""
MAX_BOXES = 16
"""Boxes looked at, from the end, for one that is whole."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-z])")
_MARKED = re.compile(r"(?:####|(?i:\banswer:))([^\n]*)")
_DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:$]|\\ |\$|~|\\displaystyle|\^\{?\\circ\}?|\\degrees?|\\quad"
)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?<=\d)(?:\s*(?:degrees?|cm|km|kg|inches|inch|feet|foot|miles?|hours?|minutes?|seconds?|dollars?|cents?|units?)|\s+[mg])"
    r"(?:\^\{?[23]\}?)?$"
)
_ASSIGNMENT = re.compile(r"^[a-zA-Z]\w?\s*=\s*(?=\S)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_SPACED_COMMA = re.compile(r",\s")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_HALF_SHORT_FRACTION = re.compile(r"\\frac(\d)\{")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_DECIMAL = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(_DECIMAL)
_RATIO = re.compile(rf"({_DECIMAL})/({_DECIMAL})")
_FRACTION = re.compile(rf"([+-]?)\\frac\{{({_DECIMAL})\}}\{{({_DECIMAL})\}}")
_MIXED = re.compile(r"([+-]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_SCIENTIFIC = re.compile(rf"({_DECIMAL})(?:\\times|\\cdot)10\^\{{?([+-]?\d{{1,3}})\}}?")
_OPENING, _CLOSING = "([{", ")]}"


def boxed_answer(text: str) -> str | None:
    r"""Return what stands in the last whole ``\boxed{...}`` (or ``\boxed x``) of ``text``; None without one."""
    for box in reversed(list(_BOX.finditer(text))[-MAX_BOXES:]):
        if (answer := _boxed(text[box.end() : box.end() + MAX_CHARACTERS + 2])) is not None:
            return answer
    return None


def _boxed(after: str) -> str | None:
    """What a box holds, given the text after its name."""
    if after[:1] == " ":
        return after.split("$")[0].split("\n")[0].strip() or None
    depth = 0
    for index, character in enumerate(after):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return after[1:index].strip() if index else None
    return None


def final_answer(text: str) -> str | None:
    r"""Return the boxed answer of ``text``, else the rest of the line after the last ``Answer:`` or ``####``; None without."""
    if (boxed := boxed_answer(text)) is not None:
        return boxed
    marked = _MARKED.findall(text)
    return (marked[-1].strip() or None) if marked else None


def normalised(answer: str) -> str:
    """Return ``answer`` without what is layout, the commas of ``1,234`` among it where they cannot be those of a list."""
    text = _without_marks(answer)
    if text[:1] not in _OPENING or _SPACED_COMMA.search(text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return _condensed(text)


def _without_marks(answer: str) -> str:
    text = answer.strip().rstrip(".").strip().replace("{,}", ",")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\%", "%")
    text = _WORDS.sub(r" \1", _DROPPED.sub("", text))
    text = _UNITS.sub("", text.strip())
    text = _ASSIGNMENT.sub("", text.strip())
    return text.replace("\\{", "{").replace("\\}", "}") if text.startswith("\\{") else text


def _condensed(text: str) -> str:
    text = text.replace(" ", "")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _HALF_SHORT_FRACTION.sub(r"\\frac{\1}{", text)
    return _SHORT_ROOT.sub(r"\\sqrt{\1}", text)


def as_rational(answer: str) -> Fraction | None:
    """Return the number that a normalised answer is, exactly; None where it is none of the plain forms."""
    if answer.endswith("%"):
        number = as_rational(answer[:-1])
        return None if number is None else number / 100
    try:
        if _PLAIN.fullmatch(answer):
            return Fraction(answer)
        if match := _RATIO.fullmatch(answer):
            return Fraction(match[1]) / Fraction(match[2])
        if match := _FRACTION.fullmatch(answer):
            return Fraction(f"{match[1]}1") * Fraction(match[2]) / Fraction(match[3])
        if match := _MIXED.fullmatch(answer):
            return Fraction(f"{match[1]}1") * (int(match[2]) + Fraction(int(match[3]), int(match[4])))
        if match := _SCIENTIFIC.fullmatch(answer):
            return Fraction(match[1]) * Fraction(10) ** int(match[2])
    except ZeroDivisionError:
        return None
    return None


def is_same_answer(answer: str, truth: str) -> bool:
    """Whether two answers are equal by their text, their number or their parts."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return False
    as_lists = (_condensed(_without_marks(text)) for text in (answer, truth))  # every comma is one between parts
    return _is_same(*as_lists) or _is_same(normalised(answer), normalised(truth))


def _is_same(left: str, right: str) -> bool:
    if left == right:
        return left != ""
    left_number, right_number = as_rational(left), as_rational(right)
    if left_number is not None and right_number is not None:
        # 50% is both 50 and 1/2: people write either.
        is_percent = left.endswith("%") != right.endswith("%")
        numbers = (as_rational(text.removesuffix("%")) for text in (left, right))
        return left_number == right_number or (is_percent and len(set(numbers)) == 1)
    left_parts, right_parts = _parts(left), _parts(right)
    if left_parts is None or right_parts is None or left_parts[0] != right_parts[0]:
        return False
    return _are_same_parts(left_parts[1], right_parts[1], is_set=left_parts[0] == "{}")


def _are_same_parts(left: list[str], right: list[str], *, is_set: bool) -> bool:
    if len(left) != len(right):
        return False
    if not is_set:
        return all(_is_same(*pair) for pair in zip(left, right, strict=True))
    rest = list(right)
    for part in left:
        match = next((other for other in rest if _is_same(part, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _parts(text: str) -> tuple[str, list[str]] | None:
    """The brackets around ``text`` (none of a bare list) and its parts; None of what is no list."""
    is_bracketed = len(text) >= 2 and text[0] in _OPENING and text[-1] in _CLOSING
    parts = _split(text[1:-1] if is_bracketed else text)
    if not is_bracketed and (parts is None or len(parts) < 2):
        return None
    return None if parts is None else (text[0] + text[-1] if is_bracketed else "", parts)


def _split(text: str) -> list[str] | None:
    """Cut at the commas outside brackets; None where brackets do not match."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            return None
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return None if depth else [*parts, text[start:]]
