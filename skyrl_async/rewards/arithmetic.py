"""A calculator for what a policy writes: four operations, powers and brackets, in bounded time.

Flows in: an expression. Flows out: its value as a text, or what is wrong with it. Nothing is executed.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_MAGNITUDE = 10**30
MAX_EXPONENT = 64
_SHOWN_DIGITS = 6
_ALLOWED = re.compile(r"[\d\s+\-*/%().eE_]*", re.ASCII)
_WHAT_IS_ALLOWED = "only numbers, + - * / // % ** and brackets"

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: Fraction(left ** int(right)),
}


def calculate(expression: str) -> str:
    """Return the value of ``expression``, rounded where it has more than six decimals; else ``error: ...``."""
    text = expression.strip().replace(",", "").replace("^", "**")
    if len(text) > MAX_CHARACTERS:
        return f"error: longer than {MAX_CHARACTERS} characters"
    try:
        if not _ALLOWED.fullmatch(text):
            raise ValueError(_WHAT_IS_ALLOWED)
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {'not an expression' if isinstance(error, SyntaxError) else error}"
    return _decimal(value)


def _decimal(value: Fraction) -> str:
    """Rounded to the digits that are shown, without zeros at the end; never by way of a float, which has 16 digits."""
    rounded = round(value * 10**_SHOWN_DIGITS)
    whole, decimals = divmod(abs(rounded), 10**_SHOWN_DIGITS)
    sign, shown = "-" if rounded < 0 else "", f"{decimals:0{_SHOWN_DIGITS}d}".rstrip("0")
    return f"{sign}{whole}.{shown}" if shown else f"{sign}{whole}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (right.denominator != 1 or abs(right) > MAX_EXPONENT):
            raise ValueError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
        return _bounded(_OPERATIONS[type(node.op)](left, right))
    raise ValueError(_WHAT_IS_ALLOWED)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > MAX_MAGNITUDE:
        raise ValueError("a number is too large")
    return value
