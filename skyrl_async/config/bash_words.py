r"""The commands of a bash script with their variables filled in, read without running any of it.

Knows quoting, continued lines, comments, here documents, arrays, ``${VAR:-default}`` and arithmetic. What only a run tells (``$(date)``, an
argument, a variable set in a branch or by ``read``) stays as it is written, with the reason.

    script ──tokens──> words ──pieces──> fields        ``a"$B c"\ d`` is one word of four pieces: a, "$B c", \ (a blank) and d
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from skyrl_async.arithmetic import OPERATIONS, value_of

_MAX_NESTED = 5
_OPENS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_BETWEEN = frozenset(
    {"then", "do", "else", "elif", "!", "time", "export", "readonly", "local", "declare", "env", "exec"}
)
_DECLARES = frozenset({"export", "readonly", "local", "declare"})
_CHANGES = frozenset({"unset", "read", "let", "mapfile", "readarray", "getopts"})
"""Builtins whose arguments are variables that they change."""
_TOWARDS_ZERO = {
    ast.Div: lambda left, right: Fraction(int(left / right)),
    ast.Mod: lambda left, right: left - right * int(left / right),
}
"""As bash divides whole numbers."""


def _bracketed(opens: str, closes: str) -> str:
    """A pattern of text in brackets, which nest; those in quotes do not count. What is not closed goes on to the end."""
    other = rf"[^{opens}{closes}'\"\\]|\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|['\"]"
    pattern = other
    for _ in range(_MAX_NESTED):
        pattern = rf"{other}|\{opens}(?:{pattern})*+(?:\{closes}|\Z)"
    return rf"\{opens}(?:{pattern})*+(?:\{closes}|\Z)"


_NAME = r"[A-Za-z_]\w*"
_PARAMETER = rf"{_NAME}|\d|[@*#?$!-]"
_EXPANSION = rf"\$(?:{_PARAMETER}|{_bracketed('(', ')')}|{_bracketed('{', '}')})|`[^`]*`?"
"""Something that another text stands for, or the output of a command."""
_PIECES = {
    "escaped": r"\\.?",
    "single": r"\$?'[^']*'?",
    "double": rf'"(?:\\.|{_EXPANSION}|[^"\\])*+"?',
    "expansion": _EXPANSION,
    "plain": r"[^\s;&|()<>$\"'`\\]+|\$",
}
_WORD = rf"(?:{'|'.join(_PIECES.values())})++"
"""Pieces without a blank between them."""
_PIECE = re.compile("|".join(rf"(?P<{kind}>{pattern})" for kind, pattern in _PIECES.items()) + "|.", re.DOTALL)
_PIECE_IN_QUOTES = re.compile(
    rf"\\(?P<escaped>[$`\"\\\n])|(?P<expansion>{_EXPANSION})|(?P<plain>[^$`\\]+|.)", re.DOTALL
)
_ALL_OF_A_LIST = re.compile(r"\$(?:@|\{(?:@|\w+\[@\])\})")
_SEVERAL = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
"""What bash makes several words of: ``{a,b}``, ``{1..8}``."""
_BRACES = re.compile(rf"\$\{{({_PARAMETER})(\[[@*]\]|:?[-=+?])?(.*?)\}}", re.DOTALL)
_TOKEN = re.compile(
    rf"""
      (?:[ \t]|\\\n|\#[^\n]*)+                                  # blanks; a comment begins only where a word might
    | \d*[<>][<>&|]*[ \t]*(?:{_bracketed("(", ")")}|{_WORD})?   # a redirection
    | (?P<end>[\n;&|()])
    | (?P<word>{_WORD})(?:(?<==)\((?P<array>(?:\s|\#[^\n]*|[;&|<>]|{_WORD})*+)\)?)?
    """,
    re.DOTALL | re.VERBOSE,
)
_ITEM = re.compile(rf"\#[^\n]*|(?P<word>{_WORD})", re.DOTALL)
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_ARITHMETIC_COMMAND = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_CHANGED = re.compile(rf"({_NAME})\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*({_NAME})")
_LOOP = re.compile(rf"\s*({_NAME})")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)(\n(?s:.*?)^\t*\2)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a script after expansion."""

    text: str
    unknown: tuple[str, ...] = ()
    """Why parts of it stand as they are written, a reason each; empty: it is what bash would have."""

    def __add__(self, other: "Text") -> "Text":
        return Text(self.text + other.text, tuple(dict.fromkeys((*self.unknown, *other.unknown))))


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: a program and its arguments."""

    words: tuple[Text, ...]
    line: int
    """Line of its first word, from 1."""


def commands_of(script: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands in the order they are written, those of branches and functions among them."""
    lines = script.replace("\r\n", "\n")
    without_documents = _HERE_DOCUMENT.sub(lambda found: found[3] + "\n" * found[4].count("\n"), lines)
    return list(_Reader(environment).commands(without_documents))


class _Reader:
    """Walks over a script once; variables have the values that the commands so far gave them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._variables: dict[str, tuple[Text, ...]] = {name: (Text(value),) for name, value in environment.items()}
        self._environment = frozenset(environment)
        self._depth = 0  # of branches, loops and functions
        self._num_subshells = 0
        self._is_joined = False  # by && or || to a command before it

    def commands(self, script: str) -> Iterator[Command]:
        words: list[Text] = []
        line, ends = 1, ""  # all that separates the last command from this one
        has_run, declares = False, False
        before: dict[str, tuple[Text, ...]] | None = None  # the assignments in front of this command
        for token in _TOKEN.finditer(script):
            if token["end"]:
                if words:
                    yield Command(tuple(words), line)
                    self._note_changes([word.text for word in words], line)
                    words, has_run = [], True
                ends, before, declares = ends + token["end"], None, False
                self._num_subshells = max(0, self._num_subshells + {"(": 1, ")": -1}.get(token["end"], 0))
                if arithmetic := _ARITHMETIC_COMMAND.match(script, token.start()):
                    names = [name for found in _CHANGED.findall(arithmetic[1]) for name in found if name]
                    line = 1 + script.count("\n", 0, token.start())
                    self._make_unknown(names, f"((...)) (line {line})")
            elif token["word"]:
                if not words:
                    line = 1 + script.count("\n", 0, token.start())
                    if ends := ends.strip("()"):
                        is_joined = ends.startswith("|") or (ends.startswith("&&") and (self._is_joined or has_run))
                        self._is_joined, has_run, ends = is_joined, has_run and is_joined, ""
                    if self._is_keyword(token):
                        declares = declares or token["word"] in _DECLARES
                        continue
                    variables = dict(self._variables)
                    if self._is_assignment(token, line):
                        before = variables if before is None else before
                        continue
                    if before is not None and not declares:  # they are in its environment alone
                        self._variables = before
                if token["word"] == "{" and words[0].text == "function":
                    self._depth, words = self._depth + 1, []
                    continue
                words += self._fields(token["word"])
        if words:
            yield Command(tuple(words), line)

    def _note_changes(self, words: list[str], line: int) -> None:
        """Variables that a builtin changes are known no longer; those of the environment outlive a ``source``."""
        builtin, *arguments = words
        if builtin in ("source", ".") and not "".join(arguments[:1]).endswith("activate"):
            self._make_unknown(self._variables.keys() - self._environment, f"{builtin} (line {line})")
        if builtin == "printf":
            arguments = arguments[1:2] if arguments[:1] == ["-v"] else []
        if builtin in _CHANGES or builtin == "printf":
            names = [found[0] for word in arguments if (found := re.match(_NAME, word))]
            self._make_unknown(names, f"{builtin} (line {line})")

    def _make_unknown(self, names: Iterable[str], by: str) -> None:
        self._variables |= {name: (Text(f"${name}", (f"{name} may be changed by {by}",)),) for name in names}

    def _is_keyword(self, token: re.Match[str]) -> bool:
        word = token["word"]
        self._depth += (word in _OPENS) - (word in _CLOSES)
        if word in ("for", "select") and (loop := _LOOP.match(token.string, token.end())):
            self._variables[loop[1]] = (Text(f"${loop[1]}", (f"{loop[1]} is the variable of a loop",)),)
        return word in _OPENS | _CLOSES | _BETWEEN

    def _is_assignment(self, token: re.Match[str], line: int) -> bool:
        """Whether the word assigns a variable, which it then has done."""
        found = _ASSIGNMENT.fullmatch(token["word"])
        if found is None:
            return False
        name, is_more, written = found.groups()
        array = token["array"]
        if self._depth or self._num_subshells or self._is_joined:
            where = "a subshell" if self._num_subshells and not self._depth else "a branch, a loop or a function"
            why = f"{name} is set in {where} (line {line})"
            self._variables[name] = (Text(written if array is None else f"({array})", (why,)),)
            return True
        old = self._variables.get(name, ()) if is_more else ()
        if array is not None:
            items = [field for item in _ITEM.finditer(array) if item["word"] for field in self._fields(item["word"])]
            self._variables[name] = (*old, *items)
        else:
            first, *others = old or (Text(""),)
            self._variables[name] = (first + self._value(written), *others)
        return True

    def _value(self, written: str) -> Text:
        """A word that bash does not split."""
        return _joined(self._fields(written, splits=False))

    def _fields(self, word: str, *, splits: bool = True) -> list[Text]:
        """The fields that a word becomes: one, or several or none where a variable is not in quotes."""
        word = re.sub(r"^~(?=/|$)", '"$HOME"', word)
        return _concatenated(self._piece(piece, splits=splits) for piece in _PIECE.finditer(word))

    def _piece(self, piece: re.Match[str], *, splits: bool) -> list[Text]:
        match piece.lastgroup, piece[0]:
            case "expansion", written:
                values = self._expanded(written)
                if not splits:
                    return [_joined(values)]
                return [Text(part, v.unknown) for v in values for part in ([v.text] if v.unknown else v.text.split())]
            case "double", written:
                return self._in_quotes(written[1:].removesuffix('"'))
            case "single", written:
                why = (f"{written} is not decoded",) if written.startswith("$") and "\\" in written else ()
                return [Text(written if why else written.lstrip("$")[1:].removesuffix("'"), why)]
            case "escaped", written:
                return [Text(written[1:].strip("\n"))]
            case "plain", written if splits and _SEVERAL.search(written):
                return [Text(written, (f"{written} is not expanded",))]
        return [Text(piece[0])]

    def _in_quotes(self, written: str) -> list[Text]:
        """One field, or those of ``"${array[@]}"``."""
        parts: list[list[Text]] = []
        for piece in _PIECE_IN_QUOTES.finditer(written):
            if expansion := piece["expansion"]:
                values = self._expanded(expansion)
                parts.append(values if _ALL_OF_A_LIST.fullmatch(expansion) else [_joined(values)])
            else:
                parts.append([Text(piece["plain"] or piece["escaped"].strip("\n"))])
        return _concatenated(parts) if _ALL_OF_A_LIST.fullmatch(written) else _concatenated([[Text("")], *parts])

    def _expanded(self, written: str) -> list[Text]:
        """What stands for a ``$...``, or for a command in backticks."""
        if written.startswith("$((") and written.endswith("))"):
            return [self._arithmetic(written)]
        if written.startswith(("$(", "`")):
            return [Text(written, (f"{written} is not run",))]
        found = _BRACES.fullmatch(written if written.startswith("${") else f"${{{written[1:]}}}")
        name, kind, other = found.groups() if found else ("", None, written)
        if kind in ("[@]", "[*]") and not other:
            return list(self._variables.get(name, ()))
        if kind is None and not other:
            return [] if name in ("@", "*") else [self._variable(name)]
        if kind is None or kind.startswith("["):
            return [Text(written, (f"{written} is known only when the script runs",))]
        return [self._or_default(name, kind, other, written)]

    def _or_default(self, name: str, kind: str, other: str, written: str) -> Text:
        """``${NAME:-other}`` and its like."""
        value = self._variable(name) if name in self._variables else None
        if kind.startswith(":") and value == Text(""):
            value = None
        if kind.endswith("+"):
            return self._value(other) if value is not None or name in ("@", "*") else Text("")
        if value is not None:
            return value
        if kind.endswith("?"):
            return Text(written, (f"{name} must be set in the environment",))
        default = self._value(other)
        if kind.endswith("="):
            self._variables[name] = (default,)
        return default

    def _variable(self, name: str) -> Text:
        if name in self._variables:
            return (*self._variables[name], Text(""))[0]
        if name.isidentifier():
            return Text(f"${name}", (f"{name} is set neither in the script nor in the environment",))
        return Text(f"${name}", (f"${name} is known only when the script runs",))

    def _arithmetic(self, written: str) -> Text:
        # Names are variables with or without a dollar; what stands for them is a number, or not known.
        filled = _joined(self._in_quotes(written[3:-2]))
        reasons = list(filled.unknown)

        def number(name: re.Match[str]) -> str:
            value = self._variable(name[0])
            reasons.extend(value.unknown)
            return value.text

        try:
            result = value_of(re.sub(_NAME, number, filled.text), OPERATIONS | _TOWARDS_ZERO)
        except (ValueError, ZeroDivisionError):
            return Text(written, (*reasons, f"{written} is known only when the script runs")[:1])
        return Text(str(result), tuple(reasons))


def _concatenated(parts: Iterable[list[Text]]) -> list[Text]:
    """Fields of a word of several parts: the last of one goes on with the first of the next."""
    fields: list[Text] = []
    for part in parts:
        if fields and part:
            fields[-1] += part[0]
            fields += part[1:]
        else:
            fields += part
    return fields


def _joined(values: list[Text]) -> Text:
    reasons = dict.fromkeys(why for value in values for why in value.unknown)
    return Text(" ".join(value.text for value in values), tuple(reasons))
