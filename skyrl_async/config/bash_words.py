"""The commands of a bash script with their variables filled in, read without running any of it.

Knows quoting, continued lines, comments, here documents, arrays, ``${VAR:-default}`` and arithmetic. What only a run tells (``$(date)``, an
argument, a variable set in a branch) stays as it is written, with the reason.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_BLANKS = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)+")
"""Between words; a comment begins where a word might."""
_PLAIN = re.compile(r"[^\s;&|()<>$\"'`\\]+")
_OPENS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_BETWEEN = frozenset(
    {"then", "do", "else", "elif", "!", "time", "export", "readonly", "local", "declare", "env", "exec"}
)
_ENDS = frozenset(" \t\n;&|()<>")
_LARGEST_EXPONENT = 64
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: operator.pow,
}
"""As in bash, where division is towards 0."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a script after expansion."""

    text: str
    unknown: tuple[str, ...] = ()
    """Why parts of it stand as they are written, a reason each; empty: it is what bash would have."""

    def __add__(self, other: "Text") -> "Text":
        return Text(self.text + other.text, (*self.unknown, *(why for why in other.unknown if why not in self.unknown)))


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: a program and its arguments."""

    words: tuple[Text, ...]
    line: int
    """Of its first word, from 1."""


def commands_of(script: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands in the order they are written, those of branches and functions among them."""
    return list(_Reader(script, environment, {}).commands())


class _Reader:
    """Walks over a script once; variables have the values that the commands so far gave them."""

    def __init__(self, text: str, environment: Mapping[str, str], variables: dict[str, tuple[Text, ...]]) -> None:
        self._text = text.replace("\r\n", "\n")
        self._environment = environment
        self._variables = variables
        self._at = 0
        self._depth = 0  # of branches, loops and functions
        self._here_documents: list[str] = []

    def commands(self) -> Iterator[Command]:
        words: list[Text] = []
        line = 1
        while self._at < len(self._text):
            char = self._text[self._at]
            if self._take(_BLANKS):
                continue
            if char in "<>":
                self._skip_redirection(words)
            elif char in "\n;&|()":
                self._at += 1
                if char == "\n":
                    self._skip_here_documents()
                if words:
                    yield Command(tuple(words), line)
                    words = []
            elif words or not self._read_keyword_or_assignment():
                line = line if words else self._line()
                words += self._word()
        if words:
            yield Command(tuple(words), line)

    def _take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Go past what matches here."""
        found = re.compile(pattern).match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _line(self) -> int:
        return 1 + self._text.count("\n", 0, self._at)

    def _skip_here_documents(self) -> None:
        for mark in self._here_documents:
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._here_documents.clear()

    def _skip_redirection(self, words: list[Text]) -> None:
        if words and words[-1].text.isdigit() and self._text[self._at - 1].isdigit():
            words.pop()  # the descriptor of 2>file
        if document := self._take(_HERE_DOCUMENT):
            self._here_documents.append(document[2])
            return
        self._take(r"[<>&|]+")
        if self._text.startswith("(", self._at):
            self._bracketed()
        else:
            self._take(r"[ \t]*")
            self._word()

    def _read_keyword_or_assignment(self) -> bool:
        """Whether the word that begins here is no program: a keyword, or an assignment, which is made."""
        line, start = self._line(), self._at
        if found := self._take(_ASSIGNMENT):
            name, is_more = found.groups()
            value = self._array() if self._text.startswith("(", self._at) else (self._value(),)
            if self._depth:
                why = f"{name} is set in a branch, a loop or a function (line {line})"
                value = (Text(self._text[found.end() : self._at], (why,)),)
            elif is_more:
                old = self._variables.get(name, ())
                value = (*old, *value) if len(value) != 1 or len(old) > 1 else ((*old, Text(""))[0] + value[0],)
            self._variables[name] = value
            return True
        found = self._take(_PLAIN)
        word = found[0] if found else ""
        if word not in _OPENS | _CLOSES | _BETWEEN:
            self._at = start
            return False
        self._depth += (word in _OPENS) - (word in _CLOSES)
        if word in ("for", "select") and (loop := re.compile(r"\s*([A-Za-z_]\w*)").match(self._text, self._at)):
            self._variables[loop[1]] = (Text(f"${loop[1]}", (f"{loop[1]} is the variable of a loop",)),)
        return True

    def _array(self) -> tuple[Text, ...]:
        self._at += 1
        values: list[Text] = []
        while self._at < len(self._text) and not self._take(r"\)"):
            if not self._take(_BLANKS) and not self._take(r"[\n;&|(<>]"):
                values += self._word()
        return tuple(values)

    def _value(self) -> Text:
        """A word that bash does not split."""
        return (*self._word(splits=False), Text(""))[0]

    def _word(self, *, splits: bool = True, ends: frozenset[str] = _ENDS) -> list[Text]:
        """The fields that the word here becomes: one, or several or none where a variable is not in quotes."""
        fields: list[Text] = []
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            char = self._text[self._at]
            if char == '"':
                pieces = self._double_quoted()
            elif char != "$":
                pieces = [self._literal(is_first=self._at == start)]
            elif splits:
                found = self._expansion()
                pieces = [Text(part, v.unknown) for v in found for part in ([v.text] if v.unknown else v.text.split())]
            else:
                pieces = [_joined(self._expansion())]
            if fields and pieces:
                fields[-1] += pieces.pop(0)
            fields += pieces
        return fields

    def _literal(self, *, is_first: bool) -> Text:
        if self._text[self._at] == "`":
            return self._backticks()
        if quoted := self._take(r"'([^']*)'?"):
            return Text(quoted[1])
        if escaped := self._take(r"(?s)\\(.?)"):
            return Text(escaped[1].strip("\n"))
        if is_first and self._take(r"~(?=[/\s;&|()<>]|$)"):
            return self._variable("HOME")
        self._at += 1
        return Text(self._text[self._at - 1])

    def _double_quoted(self) -> list[Text]:
        """One field, or those of ``"${array[@]}"``."""
        self._at += 1
        fields = [Text("")]
        while self._at < len(self._text) and not self._take('"'):
            char = self._text[self._at]
            if char == "$":
                is_list = re.compile(r"\$(@|\{(@|\w+\[@\])\})").match(self._text, self._at)
                values = self._expansion()
                if is_list and not values and fields == [Text("")] and self._take('"'):
                    return []
                first, *others = values if is_list and values else [_joined(values)]
                fields[-1] += first
                fields += others
            elif escaped := self._take(r"(?s)\\(.?)"):
                fields[-1] += Text(escaped[1].strip("\n") if escaped[1] in '$`"\\\n' else escaped[0])
            elif char == "`":
                fields[-1] += self._backticks()
            elif plain := self._take(r'[^"$\\`]+'):
                fields[-1] += Text(plain[0])
        return fields

    def _backticks(self) -> Text:
        found = self._take("`[^`]*`?")
        assert found is not None
        return Text(found[0], (f"{found[0]} is not run",))

    def _expansion(self) -> list[Text]:
        """What stands for the ``$...`` here."""
        self._at += 1
        after = self._text[self._at : self._at + 1]
        if self._text.startswith("((", self._at):
            return [self._arithmetic("$" + self._bracketed())]
        if after == "(":
            text = "$" + self._bracketed()
            return [Text(text, (f"{text} is not run",))]
        if after == "{":
            return self._braces("$" + self._bracketed())
        if after == "'":
            return [self._literal(is_first=False)]
        found = self._take(_PARAMETER)
        return self._values(found[0]) if found else [Text("$")]

    def _values(self, name: str) -> list[Text]:
        return [] if name in ("@", "*") else [self._variable(name)]

    def _variable(self, name: str) -> Text:
        if (value := self._known(name)) is not None:
            return value
        if _NAME.fullmatch(name):
            return Text(f"${name}", (f"{name} is set neither in the script nor in the environment",))
        return Text(f"${name}", (f"${name} is known only when the script runs",))

    def _known(self, name: str) -> Text | None:
        if name in self._variables:
            return (*self._variables[name], Text(""))[0]
        return Text(self._environment[name]) if name in self._environment else None

    def _braces(self, written: str) -> list[Text]:
        """``${NAME}`` and what can be said after the name."""
        found = re.fullmatch(rf"(?s)\$\{{({_PARAMETER.pattern})(\[[@*]\]|:?[-=+?])?(.*)\}}", written)
        name, kind, other = found.groups() if found else ("", None, written)
        if kind in ("[@]", "[*]") and not other:
            return list(self._variables.get(name, ()))
        if kind is None and not other:
            return self._values(name)
        if kind is None or kind.startswith("["):
            return [Text(written, (f"{written} is known only when the script runs",))]
        value = self._known(name)
        if value is not None and kind.startswith(":") and value == Text(""):
            value = None
        if kind.endswith("+"):
            return [self._evaluated(other) if value is not None or name in ("@", "*") else Text("")]
        if value is not None:
            return [value]
        if kind.endswith("?"):
            return [Text(written, (f"{name} must be set in the environment",))]
        default = self._evaluated(other)
        if kind.endswith("="):
            self._variables[name] = (default,)
        return [default]

    def _evaluated(self, written: str) -> Text:
        """A default, in which quotes count and blanks do not."""
        fields = _Reader(written, self._environment, self._variables)._word(splits=False, ends=frozenset())
        return (*fields, Text(""))[0]

    def _arithmetic(self, written: str) -> Text:
        # Names are variables with or without a dollar; what stands for them is a number, or not known.
        filled = _Reader(f'"{written[3:-2]}"', self._environment, self._variables)._value()
        reasons = list(filled.unknown)

        def number(name: str) -> int:
            value = self._variable(name)
            reasons.extend(value.unknown)
            return int(value.text)

        try:
            result = _calculated(ast.parse(filled.text.strip().replace("/", "//"), mode="eval").body, number)
        except (SyntaxError, ValueError, ArithmeticError):
            return Text(written, (*reasons, f"{written} is known only when the script runs")[:1])
        return Text(str(result), tuple(reasons))

    def _bracketed(self) -> str:
        """Go past the bracket that closes the one here, and return all of it; brackets in quotes do not count."""
        start, depth, quote = self._at, 0, ""
        opens, closes = ("(", ")") if self._text[start] == "(" else ("{", "}")
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 2 if char == "\\" and quote != "'" else 1
            if quote == "'" or (char == "'" and not quote):
                quote = "" if char == quote else "'"
            elif char == '"' and opens == "(":
                quote = "" if quote else '"'
            elif char in (opens, closes) and not quote:
                depth += 1 if char == opens else -1
                if not depth:
                    break
        return self._text[start : self._at]


def _joined(values: list[Text]) -> Text:
    joined = Text("")
    for i, value in enumerate(values):
        joined = joined + replace(value, text=f" {value.text}" if i else value.text)
    return joined


def _calculated(node: ast.expr, number: Callable[[str], int]) -> int:
    """The value of an arithmetic expression. Raises ``ValueError`` for what is none of ours."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return number(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand, number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _calculated(left, number), _calculated(right, number)
            if not isinstance(op, ast.Pow) or 0 <= b <= _LARGEST_EXPONENT:
                return _OPERATORS[type(op)](a, b)
    raise ValueError("no arithmetic on whole numbers")
