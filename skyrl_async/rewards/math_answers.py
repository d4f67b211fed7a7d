r"""Final answers in what a policy wrote, and when two of them are equal: numbers after ``####``, and ``\boxed{}``.

A number (GSM8K) is the first after ``####``, compared as a decimal: ``18``, ``18.0`` and ``$18`` are one.

Two boxed answers are equal if they are the same text once layout is taken away (spaces, ``\left``, ``\dfrac``, ``\text{}``; a unit,
``x=`` or ``x \in`` where the other has none or the same); or the same rational number, computed exactly from decimals, fractions, mixed
numbers, percents and powers of ten; or, for lists, tuples and sets, if their parts are equal (``\pm 3`` is ``3, -3``). Nothing is
evaluated, and time is linear in the length of the texts.

``is_equal_answer`` also finds ``\sqrt{3}/2`` and ``\frac{\sqrt{3}}{2}`` equal, and ``(x+1)^2`` and ``x^2+2x+1``. The package math-verify
computes that. It has sympy evaluate what a policy wrote, which may run code, and for ever; hence it runs in the sandbox.
"""

import re
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from importlib.util import find_spec

from skyrl_async.errors import ConfigError
from skyrl_async.rewards.sandbox import Limits, call_function, require_sandbox

MAX_CHARACTERS = 500
"""Longer answers equal nothing: they are no final answers."""
MAX_BOXES = 16
"""Boxes looked at, from the end, for one that is whole."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-z])(?: +(?=\{))?")
_MARKED_LINE = re.compile(r"(?:####|(?i:\banswer)[ *]*:)([^\n]*)")
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[!,;:$()\[\] ]|\$|~|\\displaystyle|\\quad")
_DEGREES = re.compile(r"\^(?:\{\\circ\}|\\circ)|\\degrees?")
_DEGREES_OF_ALL = re.compile(rf"(?<=\d)(?:{_DEGREES.pattern})$")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=\d)(?:\s*(degree|cm|km|kg|inch|feet|foot|mile|hour|minute|second|dollar|cent|unit)(?:e?s)?|\s+([mg]))"
    r"(?:\^\{?([23])\}?)?$"
)
_NO_UNIT = (
    r"(?:and|or|not|more|less|fewer|than|least|most|dozen|hundred|thousand|[a-z]*illion|squared|cubed|percent|mod|base|pi"
    r"|half|halves|(?:third|quarter|(?!month)\w+th)s?)"
)
"""Words behind a number that may change it."""
_NAMED_UNIT = re.compile(
    r"(?:(?<=[\d}])|(?<=\\pi))(?:\s|~|\\[ ,;:!])*\\(?:text|textbf|mathrm|mathbf|mbox)\{\s*"
    rf"(?![^}}]*\b{_NO_UNIT}\b)[a-zA-Z][a-zA-Z .]*[a-zA-Z.]\s*\}}(?:\^\{{?[23]\}}?)?[\s$.]*$"
)
"""``\\text{ people}`` behind a number."""
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?:\.?[a-zA-Z])+")
_LEFT_SIDE = re.compile(r"^([a-zA-Z]\w?)\s*(?:=|\\in(?![a-zA-Z]))\s*(?=\S)")
_BOTH_SIGNS = re.compile(r"\u00b1|\\pm(?![a-zA-Z])")
_CHOICE = re.compile(r"\(\s*([A-Z])\s*\)")
_GROUP = re.compile(r"\{([^{},\\]+)\}")
_SPACED_MIXED = re.compile(r"(?<![\w./}])(\d+)\s+(\d+)/(\d+)(?![\w./])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_SPACED_COMMA = re.compile(r",\s")
_SHORT_FORMS = (
    (re.compile(r"\\frac(\d)(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac(\d)\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac(\{[^{}]*\})(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"([\^_])\{(\w)\}"), r"\1\2"),
)
_DECIMAL = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(_DECIMAL)
_RATIO = re.compile(rf"({_DECIMAL})/({_DECIMAL})")
_FRACTION = re.compile(rf"([+-]?)\\frac\{{({_DECIMAL})\}}\{{({_DECIMAL})\}}")
_MIXED = re.compile(r"([+-]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_SCIENTIFIC = re.compile(rf"(?:({_DECIMAL})(?:\\times|\\cdot)|([+-]?))10\^\{{?([+-]?\d{{1,3}})\}}?")
_OPENING, _CLOSING = "([{", ")]}"
_NUMBER = r"(?:-?\\?\$|\\?\$-|-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED_NUMBER = re.compile(rf"####[\s*]*(?:\$?\\boxed\{{)?({_NUMBER})")
_ANY_NUMBER = re.compile(_NUMBER)
LIMITS = Limits(cpu_s=10, wall_s=30.0, memory_mb=2048)
"""Limits of one comparison, most of which goes to the import of sympy. An answer that needs more is wrong."""
_PROGRAM = """
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

def is_equal(answer, truth):
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    found, right = (parse(f"${text}$", extraction_config=kinds, parsing_timeout=None) for text in (answer, truth))
    return verify(right, found, timeout_seconds=None)
"""


def boxed_answer(text: str) -> str | None:
    r"""Return what stands in the last whole ``\boxed{...}`` (or ``\boxed x``) of ``text``; None without one."""
    for box in reversed(list(_BOX.finditer(text))[-MAX_BOXES:]):
        if (answer := _boxed(text[box.end() : box.end() + MAX_CHARACTERS + 2])) is not None:
            return answer
    return None


def _boxed(after: str) -> str | None:
    """Return the content of a box, given the text after its name."""
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
    marked = _MARKED_LINE.findall(text)
    return (marked[-1].strip(" \t\r*") or None) if marked else None


def _normalised(text: str) -> str:
    """``text`` without spaces, in full forms, and without the commas of ``1,234`` where they cannot be those of a list."""
    if text[:1] not in _OPENING or _SPACED_COMMA.search(text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return _condensed(text)


def _values(answer: str, truth: str) -> tuple[str, str] | None:
    """Both answers without layout, units and left sides; None where they have different units or left sides."""
    if _is_bare(truth):
        answer = _NAMED_UNIT.sub("", answer)
    if _is_bare(answer):
        truth = _NAMED_UNIT.sub("", truth)
    left_sides, values, units = zip(_taken_apart(answer), _taken_apart(truth), strict=True)
    is_contrary = any(len({*names} - {""}) > 1 for names in (left_sides, units))
    return None if is_contrary else values


def _is_bare(answer: str) -> bool:
    """Whether it has no unit, and no word that may be one."""
    return not (_WORD.search(answer) or _taken_apart(answer)[2])


def _taken_apart(answer: str) -> tuple[str, str, str]:
    """The left side (``x`` of ``x=5``), the value and the unit of an answer, without layout; empty where it has none."""
    text = answer.strip().rstrip(".").strip().replace("{,}", ",").replace("\u2212", "-")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\%", "%")
    text = _DEGREES_OF_ALL.sub(" degree", _DROPPED.sub("", text).strip())
    text = _WORDS.sub(r" \1", _DEGREES.sub("", text)).strip().rstrip(".").rstrip()
    left_side, unit = _LEFT_SIDE.match(text), _UNIT.search(text)
    value = text[left_side.end() if left_side else 0 : unit.start() if unit else None].strip()
    if whole := _CHOICE.fullmatch(value) or _GROUP.fullmatch(value):
        value = whole[1]
    value = value.replace("\\{", "{").replace("\\}", "}") if value.startswith("\\{") else value
    sign = "%" if value.endswith("%") else "dollar" if answer.strip().startswith("\\$") else ""
    unit_name = "".join(part or "" for part in unit.groups()).replace("feet", "foot") if unit else sign
    return left_side[1] if left_side else "", value, unit_name


def _condensed(text: str) -> str:
    text = "".join(_SPACED_MIXED.sub(r"\1\\frac{\2}{\3}", text).split())
    for pattern, whole in _SHORT_FORMS:
        text = pattern.sub(whole, text)
    return text


def as_rational(answer: str) -> Fraction | None:
    """Return the number that a normalised answer is, exactly; None where it is none of the plain forms."""
    if answer.endswith("%"):
        number = None if answer.endswith("%%") else as_rational(answer[:-1])
        return None if number is None else number / 100
    with suppress(ZeroDivisionError):
        if _PLAIN.fullmatch(answer):
            return Fraction(answer)
        if match := _RATIO.fullmatch(answer):
            return Fraction(match[1]) / Fraction(match[2])
        if match := _FRACTION.fullmatch(answer):
            return Fraction(f"{match[1]}1") * Fraction(match[2]) / Fraction(match[3])
        if match := _MIXED.fullmatch(answer):
            return Fraction(f"{match[1]}1") * (int(match[2]) + Fraction(int(match[3]), int(match[4])))
        if match := _SCIENTIFIC.fullmatch(answer):
            return Fraction(match[1] or f"{match[2]}1") * Fraction(10) ** int(match[3])
    return None


def is_same_answer(answer: str, truth: str) -> bool:
    """Whether two answers are equal by their text, their number or their parts."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS or (values := _values(answer, truth)) is None:
        return False
    as_lists = map(_condensed, values)  # every comma is one between parts
    is_same = _is_same(*as_lists) or _is_same(*map(_normalised, values))
    return is_same or (any(map(_BOTH_SIGNS.search, values)) and _is_same(*map(_as_set, values)))


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
    brackets, rest = right_parts
    if len(left_parts[1]) != len(rest):
        return False
    for part in left_parts[1]:
        candidates = range(len(rest) if brackets == "{}" else 1)
        found = next((index for index in candidates if _is_same(part, rest[index])), None)
        if found is None:
            return False
        del rest[found]
    return True


def _parts(text: str) -> tuple[str, list[str]] | None:
    """The brackets around ``text`` (none of a bare list) and its parts; None of what is no list."""
    is_bracketed = len(text) >= 2 and text[0] in _OPENING and text[-1] in _CLOSING
    brackets, inside = (text[0] + text[-1], text[1:-1]) if is_bracketed else ("", text)
    parts = _split(inside)
    return None if parts is None or (len(parts) < 2 and not is_bracketed) else (brackets, parts)


def _as_set(text: str) -> str:
    r"""The set of its parts, of which ``\pm 3`` is two."""
    parts: list[str] = []
    for part in _split(text[1:-1] if text.startswith("{") and text.endswith("}") else text) or [text]:
        around = _BOTH_SIGNS.split(part)
        parts += [sign.join(around).strip().removeprefix("+") for sign in "+-"] if len(around) == 2 else [part]
    return _condensed(f"{{{','.join(parts)}}}")


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


def strict_answer(text: str) -> str | None:
    """Return the first number after a ``####`` of ``text``, as it is written; None without one."""
    found = _MARKED_NUMBER.search(text)
    return found[1] if found else None


def flexible_answer(text: str) -> str | None:
    """Return the last number of ``text``, marked or not; None without one."""
    found = _ANY_NUMBER.findall(text)
    return found[-1] if found else None


def as_number(text: str) -> Decimal | None:
    """Return what ``1,234.50`` or ``$12`` is as a number; None for what is none."""
    try:
        number = Decimal(text.strip().replace(",", "").replace("\\$", "").replace("$", ""))
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


def require_math_verify() -> None:
    """Raise ``ConfigError`` where math-verify is not installed, or what it runs cannot be confined."""
    if find_spec("math_verify") is None:
        raise ConfigError(
            "env_class=math_verify needs the package math-verify, which is not installed: install skyrl-async[math-verify] "
            "(uv run --extra math-verify ...), or use env_class=math, which evaluates nothing"
        )
    require_sandbox()


def is_equal_answer(answer: str, truth: str, *, limits: Limits = LIMITS) -> bool:
    """Whether two answers are equal. Blocks for seconds, unless they are the same, or two numbers.

    Raises ``GenerationError`` where the sandbox could not be set up.
    """
    if is_same_answer(answer, truth):
        return True
    if max(len(answer), len(truth)) > MAX_CHARACTERS or (values := _values(answer, truth)) is None:
        return False
    if all(as_rational(_normalised(text)) is not None for text in values):
        return False
    _, results = call_function(_PROGRAM, "is_equal", [(answer, truth)], limits=limits)
    return results == [True]
