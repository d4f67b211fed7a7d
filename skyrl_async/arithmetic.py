"""The exact value of an arithmetic expression in a text, which is read and not run."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_MAGNITUDE = 10**30
MAX_EXPONENT = 64
_ALLOWED = re.compile(r"[\d\s+\-*/%().eE_]*", re.ASCII)
_WHAT_IS_ALLOWED = "only numbers, + - * / // % ** and brackets"
Operations = dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]
OPERATIONS: Operations = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: Fraction(left ** int(right)),
}


def value_of(expression: str, operations: Operations = OPERATIONS) -> Fraction:
    """The value of an expression in Python's grammar; ``operations`` say what its operators do.

    Raises ``ValueError`` that says what is wrong with it, or ``ZeroDivisionError``.
    """
    if not _ALLOWED.fullmatch(expression):
        raise ValueError(_WHAT_IS_ALLOWED)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, operations)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression" if isinstance(error, SyntaxError) else str(error)) from error


def _value(node: ast.expr, operations: Operations) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, operations)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in operations:
        left, right = _value(node.left, operations), _value(node.right, operations)
        if isinstance(node.op, ast.Pow) and (right.denominator != 1 or abs(right) > MAX_EXPONENT):
            raise ValueError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
        return _bounded(operations[type(node.op)](left, right))
    raise ValueError(_WHAT_IS_ALLOWED)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > MAX_MAGNITUDE:
        raise ValueError("a number is too large")
    return value
