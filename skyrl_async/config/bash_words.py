"""The commands of a bash script with their variables filled in, read without running any of it.

Flows in: the text of a script, and an environment. Flows out: commands as lists of words. Knows quoting, continued lines, comments, here
documents, arrays, ``${VAR:-default}`` and arithmetic. What only running tells (``$(date)``, an argument, a variable set in a branch) stays
as it is written, with the reason.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_OPENS, _CLOSES = (
    frozenset({"if", "for", "while", "until", "case", "select", "{"}),
    frozenset({"fi", "done", "esac", "}"}),
)
_BETWEEN = frozenset(
    {"then", "do", "else", "elif", "!", "time", "export", "readonly", "local", "declare", "env", "exec"}
)
_ENDS = frozenset(" \t\n;&|()<>")
_LARGEST_EXPONENT = 64


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
            if char in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._skip_line()
            elif char in "<>":
                self._skip_redirection(words)
            elif char in "\n;&|()":
                self._at += 1
                if char == "\n":
                    self._skip_here_documents()
                if words:
                    yield Command(tuple(words), line)
                    words = []
            elif not words and self._read_keyword_or_assignment():
                pass
            else:
                line = line if words else 1 + self._text.count("\n", 0, self._at)
                words += self._word()
        if words:
            yield Command(tuple(words), line)

    def _skip_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _skip_here_documents(self) -> None:
        for mark in self._here_documents:
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._here_documents.clear()

    def _skip_redirection(self, words: list[Text]) -> None:
        if words and words[-1].text.isdigit() and self._text[self._at - 1].isdigit():
            words.pop()  # the descriptor of 2>file
        if document := _HERE_DOCUMENT.match(self._text, self._at):
            self._here_documents.append(document[2])
            self._at = document.end()
            return
        while self._at < len(self._text) and self._text[self._at] in "<>&|":
            self._at += 1
        if self._text.startswith("(", self._at):
            self._at = self._end_of_parentheses(self._at)
            return
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        self._word()

    def _read_keyword_or_assignment(self) -> bool:
        """Whether the word that begins here is no program: a keyword, or an assignment, which is made."""
        if found := _ASSIGNMENT.match(self._text, self._at):
            line, start = 1 + self._text.count("\n", 0, self._at), self._at
            self._at = found.end()
            if self._text.startswith("(", self._at):
                value = self._array()
            else:
                value = (self._value(),)
            if self._depth:
                why = f"{found[1]} is set in a branch, a loop or a function (line {line})"
                value = (Text(self._text[start + len(found[0]) : self._at], (why,)),)
            elif found[2]:
                old = self._variables.get(found[1], ())
                value = (*old, *value) if len(value) != 1 or len(old) > 1 else ((*old, Text(""))[0] + value[0],)
            self._variables[found[1]] = value
            return True
        found = re.compile(r"[^\s;&|()<>$\"'`\\]+").match(self._text, self._at)
        word = found[0] if found else ""
        if word not in _OPENS | _CLOSES | _BETWEEN:
            return False
        self._at += len(word)
        self._depth += (word in _OPENS) - (word in _CLOSES)
        if word in ("for", "select") and (name := re.compile(r"\s*([A-Za-z_]\w*)").match(self._text, self._at)):
            self._variables[name[1]] = (Text(f"${name[1]}", (f"{name[1]} is the variable of a loop",)),)
        return True

    def _array(self) -> tuple[Text, ...]:
        self._at += 1
        values: list[Text] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "#":
                self._skip_line()
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] in _ENDS:
                self._at += 1
            else:
                values += self._word()
        self._at += 1
        return tuple(values)

    def _value(self) -> Text:
        """A word that bash does not split."""
        fields = self._word(splits=False)
        return fields[0] if fields else Text("")

    def _word(self, *, splits: bool = True, ends: frozenset[str] = _ENDS) -> list[Text]:
        """The fields that the word here becomes: one, or several or none where a variable is not in quotes."""
        fields: list[Text] = []
        here: Text | None = None
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            char = self._text[self._at]
            if char == "$":
                values = self._expansion()
                if splits:
                    values = [
                        Text(part, v.unknown) for v in values for part in ([v.text] if v.unknown else v.text.split())
                    ]
                else:
                    values = [_joined(values)]
                for i, value in enumerate(values):
                    if i and here is not None:
                        fields.append(here)
                        here = None
                    here = value if here is None else here + value
            elif char == '"':
                pieces = self._double_quoted()
                for i, piece in enumerate(pieces):
                    if i and here is not None:
                        fields.append(here)
                        here = None
                    here = piece if here is None else here + piece
            else:
                here = (here or Text("")) + self._literal(is_first=self._at == start)
        return fields if here is None else [*fields, here]

    def _literal(self, *, is_first: bool) -> Text:
        char = self._text[self._at]
        if char == "'":
            end = self._text.find("'", self._at + 1)
            end = len(self._text) if end < 0 else end
            text = self._text[self._at + 1 : end]
            self._at = end + 1
            return Text(text)
        if char == "\\":
            self._at += 2
            return (
                Text("") if self._text[self._at - 1 : self._at] == "\n" else Text(self._text[self._at - 1 : self._at])
            )
        if char == "`":
            return self._backticks()
        self._at += 1
        if char == "~" and is_first and self._text[self._at : self._at + 1] in ("", "/", *_ENDS):
            return self._variable("HOME")
        return Text(char)

    def _double_quoted(self) -> list[Text]:
        """One field, or those of ``"${array[@]}"``."""
        self._at += 1
        fields = [Text("")]
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "$":
                is_list = bool(re.compile(r"\$(@|\{(@|\w+\[@\])\})").match(self._text, self._at))
                values = self._expansion()
                if is_list and not values and self._text[self._at : self._at + 1] == '"' and fields == [Text("")]:
                    self._at += 1
                    return []
                first, *others = values if is_list and values else [_joined(values)]
                fields[-1] += first
                fields += others
            elif char == "\\":
                after = self._text[self._at + 1 : self._at + 2]
                fields[-1] += Text({"\n": ""}.get(after, after) if after in '$`"\\\n' else char + after)
                self._at += 2
            elif char == "`":
                fields[-1] += self._backticks()
            else:
                fields[-1] += Text(char)
                self._at += 1
        self._at += 1
        return fields

    def _backticks(self) -> Text:
        end = self._text.find("`", self._at + 1)
        end = len(self._text) - 1 if end < 0 else end
        text = self._text[self._at : end + 1]
        self._at = end + 1
        return Text(text, (f"{text} is not run",))

    def _expansion(self) -> list[Text]:
        """What stands for the ``$...`` here."""
        start = self._at
        after = self._text[start + 1 : start + 2]
        if self._text.startswith("$((", start):
            end = self._end_of_parentheses(start + 1)
            self._at = end
            return [self._arithmetic(self._text[start:end])]
        if after == "(":
            self._at = self._end_of_parentheses(start + 1)
            text = self._text[start : self._at]
            return [Text(text, (f"{text} is not run",))]
        if after == "{":
            self._at = self._end_of_braces(start + 1)
            return self._braces(self._text[start : self._at])
        if after == "'":
            self._at += 1
            return [self._literal(is_first=False)]
        found = _PARAMETER.match(self._text, start + 1)
        if not found:
            self._at += 1
            return [Text("$")]
        name = found[0][0] if found[0].isdigit() else found[0]
        self._at = start + 1 + len(name)
        return self._values(name)

    def _values(self, name: str) -> list[Text]:
        return [] if name in ("@", "*") else [self._variable(name)]

    def _variable(self, name: str) -> Text:
        value = self._known(name)
        if value is not None:
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
        inside = written[2:-1]
        found = _PARAMETER.match(inside)
        name, rest = (found[0], inside[found.end() :]) if found else ("", inside)
        if rest in ("[@]", "[*]"):
            return list(self._variables.get(name, ()))
        if rest == "":
            return self._values(name) if name else [Text(written)]
        operator = re.compile(r":?[-=+?]").match(rest)
        if not found or operator is None:
            return [Text(written, (f"{written} is known only when the script runs",))]
        other, value = rest[operator.end() :], self._known(name)
        is_set = value is not None and not (operator[0].startswith(":") and value == Text(""))
        kind = operator[0][-1]
        if kind == "+":
            return [self._evaluated(other) if is_set or name in ("@", "*") else Text("")]
        if is_set and value is not None:
            return [value]
        if kind == "?":
            return [Text(written, (f"{name} must be set in the environment",))]
        default = self._evaluated(other)
        if kind == "=":
            self._variables[name] = (default,)
        return [default]

    def _evaluated(self, written: str) -> Text:
        """A default, in which quotes count and blanks do not."""
        fields = _Reader(written, self._environment, self._variables)._word(splits=False, ends=frozenset())
        return fields[0] if fields else Text("")

    def _arithmetic(self, written: str) -> Text:
        inside = written[3:-2]
        # Names are variables with or without a dollar; what stands for them is a number, or not known.
        filled = _joined([_Reader(f'"{inside}"', self._environment, self._variables)._value()])
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

    def _end_of_parentheses(self, at: int) -> int:
        return self._end_of(at, "(", ")")

    def _end_of_braces(self, at: int) -> int:
        return self._end_of(at, "{", "}")

    def _end_of(self, at: int, opens: str, closes: str) -> int:
        """Behind the bracket that closes the one at ``at``; those in quotes do not count."""
        depth, quote = 0, ""
        while at < len(self._text):
            char = self._text[at]
            if char == "\\" and quote != "'":
                at += 1
            elif quote == "'":
                quote = "" if char == "'" else quote
            elif char == "'" and not quote:
                quote = "'"
            elif char == '"' and opens == "(":
                quote = "" if quote else '"'
            elif char == opens and not quote:
                depth += 1
            elif char == closes and not quote:
                depth -= 1
                if not depth:
                    return at + 1
            at += 1
        return len(self._text)


def _joined(values: list[Text]) -> Text:
    joined = Text("")
    for i, value in enumerate(values):
        joined = joined + replace(value, text=f" {value.text}" if i else value.text)
    return joined


def _calculated(node: ast.expr, number: Callable[[str], int]) -> int:
    """The value of an arithmetic expression; division is towards 0, as in bash. Raises ``ValueError`` for what is none of ours."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return number(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand, number)
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _calculated(left, number), _calculated(right, number)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
                case ast.Mod():
                    return abs(a) % abs(b) * (-1 if a < 0 else 1)
                case ast.Pow() if 0 <= b <= _LARGEST_EXPONENT:
                    return int(a**b)
    raise ValueError("no arithmetic on whole numbers")
