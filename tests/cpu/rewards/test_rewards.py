"""Rewards of final answers, of calculations and of programs, against skyrl_gym, sympy and plain Python."""

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.environments.tools import calculate, first_call
from skyrl_async.rewards.code_tests import (
    CodeTests,
    is_same_output,
    is_same_result,
    judge_program,
    program_in,
    read_tests,
)
from skyrl_async.rewards.math_answers import (
    MAX_CHARACTERS,
    boxed_answer,
    final_answer,
    flexible_answer,
    is_right_answer,
    is_same_answer,
    strict_answer,
)

TEXTS = st.text(alphabet="#0123456789.,-$ ab\n", max_size=40)


@given(text=TEXTS, truth=st.integers(-(10**6), 10**6), is_marked=st.booleans())
def test_what_skyrl_gym_rewards_is_rewarded(text: str, truth: int, is_marked: bool) -> None:
    from skyrl_gym.envs.gsm8k.utils import compute_score

    text = f"{text} #### {truth:,}" if is_marked else text
    if "####" not in text.replace(f"#### {truth:,}", "") and compute_score(text, str(truth)) == 1.0:
        assert is_right_answer(text, str(truth))
    if "####" not in text:
        assert not is_right_answer(text, str(truth))


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("2+3=5\n#### 5", "5", "5"),
        ("#### $1,234.50.", "$1,234.50", "$1,234.50"),
        ("####-7 apples", "-7", "-7"),
        (r"#### \$18", r"\$18", r"\$18"),
        ("#### $-5", "$-5", "$-5"),
        ("#### **18**", "18", "18"),
        (r"#### \boxed{5}", "5", "5"),
        (r"#### $\boxed{1,234}$", "1,234", "1,234"),
        ("#### 5\n#### 6", "5", "6"),
        ("so 12 in all", None, "12"),
        ("#### none of 3", None, "3"),
        ("", None, None),
    ],
)
def test_the_marked_number_is_the_strict_answer_and_the_last_number_the_flexible_one(
    text: str, strict: str | None, flexible: str | None
) -> None:
    assert (strict_answer(text), flexible_answer(text)) == (strict, flexible)


def test_an_answer_is_right_by_its_value() -> None:
    assert is_right_answer("#### $1,000.00", "1000") and is_right_answer("#### 18", "18.0")
    assert is_right_answer(r"#### \$18", "18") and is_right_answer("#### $-5", "-5")
    assert (
        not is_right_answer("#### 18", "81") and not is_right_answer("18", "18") and not is_right_answer("#### 1", "x")
    )
    assert is_right_answer("it is 18", "18", is_flexible=True)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"$\boxed 5$", "5"),
        (r"\fbox{a{b}c}", "a{b}c"),
        ("we get\nAnswer: 42\n", "42"),
        ("#### x+1", "x+1"),
        ("**Answer:** 42", "42"),
        ("**Answer**: 42", "42"),
        ("**Answer: 42**", "42"),
        ("Answer : 42", "42"),
        ("#### **42**", "42"),
        (r"\boxed {42}", "42"),
        ("Answer:", None),
        ("nothing", None),
    ],
)
def test_the_last_whole_box_is_the_answer_or_what_follows_a_mark(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


EQUAL = [
    (r"\frac12", "0.5"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"1\frac{1}{2}", "1.5"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    (r"50.0\%", "50"),
    (r"1{,}234", "1234"),
    ("1,234,567", "1234567"),
    (r"x = 5", "5"),
    (r"5 \text{ cm}", "5"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90 degrees"),
    (r"30^\circ, 60^\circ", "30, 60"),
    (r"\frac{90^\circ}{2}", r"\frac{90}{2}"),
    (r"6 \text{ people}", "6"),
    (r"\frac{3}{2}\text{ square units}", "3/2"),
    (r"12\pi\text{ cubic inches}", r"12\pi"),
    (r"3\text{ apples}", "3 apples"),
    (r"12\text{ months}", "12"),
    (r"4\text{ p.m.}", "4 p.m."),
    (r"4\text{ p.m.}", "4"),
    (r"x \in [0,1]", "[0,1]"),
    (r"x\in\{1,2\}", r"\{2, 1\}"),
    (r"\pm 3", "3,-3"),
    (r"\pm 3", "-3, 3"),
    ("\u00b13", r"\{3,-3\}"),
    (r"x=\pm\frac12", "-0.5, 0.5"),
    (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
    (r"\left( 3, \frac{1}{2} \right)", "(3, 0.5)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    (r"\left\{1,2\right\}", r"\{1,2\}"),
    (r"\left\{1,2\right\}", r"\left\{2,1\right\}"),
    (r"\left\{ 1, \frac12 \right\}", r"\{0.5, 1\}"),
    (r"\left \{1,2\right \}", r"{1,2}"),
    (r"S = \{1,2\}", r"\{2,1\}"),
    (r"2\sqrt3", r"2\sqrt{3}"),
    (r"3 \times 10^{2}", "300"),
    (r"\text{Monday}", "Monday"),
    (r"\$12.00", "12"),
    ("(0,180)", "(0, 180)"),
    ("(1,234, 5)", "(1234, 5)"),
    ("100,200,300", "100, 200, 300"),
    (r"\{100,200\}", r"\{200, 100\}"),
    (r"1,\!234\text{ km}", "1234"),
    (r"3\text{m}", "3"),
    ("3 hours", "3 hour"),
    ("2 feet", "2 foot"),
    ("5 cm^2", r"5\text{ cm}^{2}"),
    (r"\$5", "5 dollars"),
    ("x=1", "x = 1"),
    ("1 1/2", "1.5"),
    ("-2 1/3", "-7/3"),
    ("2 1/2 inches", "2.5"),
    ("(1 1/2, 3)", "(1.5, 3)"),
    ("10^{5}", "100000"),
    ("10^{-3}", "0.001"),
    ("-10^2", "-100"),
    (r"\(42\)", "42"),
    (r"\text{(C)}", "C"),
    ("{42}", "42"),
    ("x^{2}+x_{1}", "x^2 + x_1"),
    ("2516_{8}", "2516_8"),
    ("\u22125", "-5"),
    (r"\frac{1}2", "0.5"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix}1\\-2\end{pmatrix}"),
    ("\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}", r"\begin{pmatrix} 1&2 \\ 3&4 \end{pmatrix}"),
]
DIFFERENT = [
    ("0.333", "1/3"),
    ("(1,2)", "(2,1)"),
    ("(1,2]", "(1,2)"),
    ("1,2", "1,2,3"),
    (r"\{1,1\}", r"\{1,2\}"),
    (r"\left\{1,2\right\}", r"\left\{1,3\right\}"),
    (r"\left\{1,2\right\}", r"\left(1,2\right)"),
    ("12", "1,2"),
    ("", ""),
    ("x", "y"),
    ("1/0", "1"),
    ("2^{10}", "1024"),
    ("x^{10}", "x^1"),
    ("(1,200)", "(1200)"),
    ("1, 200", "1200"),
    ("3m", "3"),
    ("3 hours", "3 minutes"),
    ("3 miles", "3 minutes"),
    ("5 cm", "5 km"),
    ("5 m", "5 g"),
    ("5 dollars", "5 cents"),
    (r"\$5", "5 cents"),
    (r"5\%", "5 cents"),
    (r"90^\circ", "90 cm"),
    (r"90^{\circ}", r"90\%"),
    (r"\$90", r"90^\circ"),
    (r"6\text{ people}", r"6\text{ cm}"),
    (r"4\text{ p.m.}", r"4\text{ a.m.}"),
    (r"6\text{ people}", r"6\%"),
    (r"6\text{ people}", r"6^\circ"),
    (r"3\text{ million}", "3"),
    (r"3\text{ halves}", "3"),
    (r"4\text{ or more}", "4"),
    (r"3x\text{ apples}", "3"),
    ("2 pi", "2"),
    (r"x \in [0,1]", r"y \in [0,1]"),
    (r"x \in [0,1]", "[0,1)"),
    (r"\pm 3", "3"),
    (r"\pm 3", "3,3"),
    (r"\pm 3", "(3,-3)"),
    (r"1 \pm 2 \pm 3", "6,-4"),
    ("5 cm^2", "5 cm^3"),
    ("5 cm^2", "5 cm"),
    ("1 1/2", "11/2"),
    ("2 1/3", "7"),
    ("x=1", "y=1"),
    ("(C)", "D"),
    (f"1{'%' * 400}", "1"),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_answers_that_differ_in_layout_or_in_form_are_equal(left: str, right: str) -> None:
    assert is_same_answer(left, right) and is_same_answer(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_answers_that_differ_are_not_equal(left: str, right: str) -> None:
    assert not is_same_answer(left, right) and not is_same_answer(right, left)


@given(numerator=st.integers(-999, 999), denominator=st.integers(1, 99), other=st.fractions(-9, 9, max_denominator=99))
def test_fractions_are_compared_exactly(numerator: int, denominator: int, other: Fraction) -> None:
    sign = "-" if numerator < 0 else ""
    written = rf"{sign}\frac{{{abs(numerator)}}}{{{denominator}}}"
    assert is_same_answer(written, f"{numerator}/{denominator}")
    is_equal = Fraction(numerator, denominator) == other
    assert is_same_answer(written, f"{other.numerator}/{other.denominator}") is is_equal


@given(st.text(alphabet=r"\boxedfrac{}()[],/.^%+-*1230 $", max_size=80))
def test_any_text_has_an_answer_or_none_and_equals_no_text_of_other_letters(text: str) -> None:
    boxed_answer(text)
    assert not is_same_answer(text, "an answer that is not in it")
    assert not is_same_answer(f"{text}{'1' * MAX_CHARACTERS} ", f"{text}{'1' * MAX_CHARACTERS} ")


def test_an_answer_that_would_take_for_ever_to_evaluate_is_not_evaluated() -> None:
    assert not is_same_answer("9^{9^{9^{9}}}", "1")
    assert boxed_answer(r"\boxed{" * 20_000) is None


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(0, 10**6))
def test_the_calculator_agrees_with_python(numbers: list[int], seed: int) -> None:
    rng = random.Random(seed)
    expression = str(numbers[0])
    for number in numbers[1:]:
        expression = f"({expression} {rng.choice('+-*/')} {number})"
    found, expected = calculate(expression), eval(expression)
    assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1,000 + 2^3", "1008"),
        ("-7//2", "-4"),
        ("7 % 3", "1"),
        ("1/3", "0.333333"),
        ("2**-1", "0.5"),
        ("1/0", "error: division by zero"),
        ("2**-1 - 1/2", "0"),
        ("1/10000000", "0"),
        ("1000000 + 1/10000000", "1000000"),
        ("-1/8000000", "0"),
        ("-7/4", "-1.75"),
        ("10**22/3", "3333333333333333333333.333333"),
        ("1or 2", "error: only numbers"),
        ("9**9**9", "error: an exponent must be"),
        ("(10**30)*10", "error: a number is too large"),
        ("__import__('os')", "error: only numbers"),
        ("1 +", "error: not an expression"),
        ("1" * 300, "error: longer than"),
        ("True + 1", "error: only numbers"),
    ],
)
def test_the_calculator_is_exact_to_six_decimals_and_says_what_it_cannot_do(expression: str, value: str) -> None:
    found = calculate(expression)
    assert found.startswith(value) if value.startswith("error") else found == value


DOUBLE = "n = int(input())\nprint(2 * n)\n"


def test_the_last_fenced_block_of_python_is_the_program() -> None:
    text = "First\n```python\na\n```\nthen\n```py\nb\n```\nand ```json\n{}\n```"
    assert program_in(text) == "b\n"
    assert program_in("```\nc\n```") == "c\n"
    assert program_in("```python\nd\n```\nFor the input 3 it prints\n```\n6\n```") == "d\n"
    assert program_in("```\ne\n```\nnot\n```text\nf\n```") == "e\n"
    assert program_in("<think>\n```python\ng\n</think>\nSo:\n```python\nh\n```\n") == "h\n", "a fence has no partner"
    assert program_in("print(1)") is None
    assert program_in("```python\nopen") is None


@pytest.mark.parametrize(
    "piece", ["```", "```python\n", "<calc>", "#### ", "\\boxed{", "Answer:", "1,", " ", "-", "$", "*", "answer "]
)
def test_what_is_looked_for_in_an_answer_is_found_in_linear_time(piece: str) -> None:
    """Each took minutes on this length where it was quadratic; the deadline is that of the test."""
    text = piece * (1_000_000 // len(piece))
    for look in (strict_answer, flexible_answer, final_answer, program_in):
        look(text)
    for marks in (("<calc>", "</calc>"), ("```python\n", "```")):
        first_call(text, *marks)


def test_programs_are_tested_by_input_and_output_until_the_first_failure() -> None:
    tests = read_tests('{"inputs": ["1\\n", "4\\n", "5\\n"], "outputs": ["2", "8 \\n\\n", "11"]}')
    verdict = judge_program(DOUBLE, tests)
    assert (verdict.num_passed, verdict.num_tests) == (2, 3)
    assert verdict.reason == r"test 3 ('5\n'): wrote '10\n' instead of '11'"
    assert judge_program(DOUBLE, CodeTests(function=None, inputs=("1",), outputs=("2",))).reason is None


def test_functions_are_tested_by_arguments_and_results_of_either_dataset_form() -> None:
    source = "def add(a, b):\n    print('noise')\n    return a + b\n"
    apps = read_tests({"inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [1, 2]], "fn_name": "add"})
    assert judge_program(source, apps).reason is None
    one = {"input": "1.5\n2", "output": "3.5", "testtype": "functional", "metadata": {"func_name": "add"}}
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    assert judge_program(method, read_tests([one, one])).reason is None
    verdict = judge_program(source.replace("+", "-"), read_tests([one]))
    assert verdict.reason == "'add(1.5, 2)' returned -0.5 instead of 3.5"


@pytest.mark.parametrize(
    "source",
    [
        "class Solution:\n  def search(self, nums: List[int], target: int) -> Optional[int]: return bisect_left(nums, target)",
        "from __future__ import annotations\ndef search(nums: Any, target): return Counter(nums[:bisect.bisect(nums, target)]).total() - 1",
        "def search(nums, target): return pow(heapq.nsmallest(2, nums)[1] - 2, gcd(2, 3), 2)",
        "def search(nums, target):\n  def at(i): return 1 if i == 5000 else at(i + 1)\n  return at(0) * datetime.date(1, 1, 1).day",
    ],
)
def test_a_right_function_needs_no_imports_of_its_own(source: str) -> None:
    tests = CodeTests(function="search", inputs=([[2, 5, 7], 5],), outputs=(1,))
    assert judge_program(source, tests).reason is None


def test_a_right_program_needs_no_imports_of_its_own_and_its_lines_keep_their_numbers() -> None:
    tests = CodeTests(function=None, inputs=("3\n",), outputs=("3 [0, 1, 2]",))
    source = "n = int(sys.stdin.readline())\nif __name__ == '__main__':\n    print(n, sorted(deque(range(n))))"
    assert judge_program(f"from __future__ import annotations\n{source}", tests).reason is None
    long = CodeTests(function=None, inputs=("5000",), outputs=(f"1{'0' * 5000}",))
    assert judge_program("print(10 ** int(input()))", long).reason is None, "Python refuses so many digits by default"
    verdict = judge_program("x = 1\nif x:\npass", tests)
    assert verdict.reason is not None and "after 'if' statement on line 2" in verdict.reason


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("numpy.int64(x)", 3),
        ("{'a': [numpy.float32(x), numpy.bool_(x)]}", {"a": [3.0, True]}),
        ("numpy.arange(x)", [0, 1, 2]),
    ],
)
def test_results_of_numpy_are_judged_by_value(returned: str, expected: Any) -> None:
    tests = CodeTests(function="f", inputs=([3],), outputs=(expected,))
    assert judge_program(f"import numpy\ndef f(x): return {returned}", tests).reason is None


def test_a_function_that_is_missing_or_returns_no_json_fails_with_a_reason() -> None:
    tests = CodeTests(function="f", inputs=([1],), outputs=([1],))
    modern = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n  x: int\ndef f(x): return A(x).x"
    )
    assert judge_program(modern, tests).reason is None
    missing, wrong = judge_program("x = 1", tests), judge_program("def f(x): return {x}", tests)
    assert missing.reason is not None and "AttributeError: module 'program' has no attribute 'f'" in missing.reason
    assert wrong.reason is not None and "TypeError" in wrong.reason


@pytest.mark.parametrize(
    ("source", "is_right"),
    [
        ("x = 1", False),
        ("class Solution: pass", False),
        ("from math import gcd", True),
        ("class Solution:\n  def gcd(self, a, b): return gcd(a, b)", True),
    ],
)
def test_a_name_that_programs_are_given_is_no_function_of_theirs(source: str, is_right: bool) -> None:
    tests = CodeTests(function="gcd", inputs=([4, 6],), outputs=(2,))
    assert (judge_program(source, tests).reason is None) is is_right


FUNCTIONAL: dict[str, Any] = {
    "input": "1",
    "output": "1",
    "testtype": "functional",
    "metadata": {"func_name": "f"},
}


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("3", "must be an object with inputs and outputs, or a list of objects, got 3"),
        ({"inputs": ["1"]}, "must have lists inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "as many outputs as inputs, and some, got 1 and 0"),
        ([], "got 0 and 0"),
        ([{"input": "1"}], "must have input and output"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "must have metadata.func_name"),
        ([FUNCTIONAL | {"metadata": "f"}], "must have metadata.func_name, got {.*'metadata': 'f'}"),
        ([FUNCTIONAL | {"output": 5}], "must have JSON texts, one argument a line, as input and output, got 5: "),
        ([FUNCTIONAL | {"input": "1\nx"}], "must have JSON texts, one argument a line, as input and output, got 'x': "),
        ({"fn_name": "f", "inputs": [5], "outputs": [5]}, "inputs must hold a list of arguments per call, got 5"),
        ({"fn_name": "f", "inputs": ["abc"], "outputs": [5]}, "must hold a list of arguments per call, got 'abc'"),
        ({"fn_name": "f", "inputs": [None], "outputs": [5]}, "must hold a list of arguments per call, got None"),
        ("{", "Expecting"),
    ],
)
def test_tests_that_cannot_be_read_say_what_they_should_be(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("0.5", "0.50", True),
        ("0.3333333333333333", "0.333333", True),
        ("x 1.5e-05\n-0.0", "x 0.000015\n0.00", True),
        ("1e-05 1e+16", "0.00001 10000000000000000.0", True),
        ("1e5", "10e4", False),
        ("0.51", "0.50", False),
        ("0.333", "0.333333", False),
        ("1000000007", "1000000000", False),
        ("3", "3.0", False),
        ("007", "7", False),
        ("0.5 1", "0.5\n1", False),
        ("1.2.3", "1.2.30", False),
    ],
)
def test_a_decimal_is_right_however_many_digits_are_written(output: str, expected: str, is_same: bool) -> None:
    assert is_same_output(output, expected) is is_same


def test_outputs_are_compared_by_words_and_results_by_value() -> None:
    assert is_same_output("1 2\n3\n\n", "1  2 \n3") and not is_same_output("1 2 3", "1 2\n3")
    assert is_same_output("\n1\n2", "1\n2") and not is_same_output("1\n\n2", "1\n2")
    assert is_same_result([1, 2.0000000001], [1.0, 2]) and is_same_result({"a": [True]}, {"a": [True]})
    assert not is_same_result(True, 1) and not is_same_result([1], [1, 2]) and not is_same_result("1", 1)


@pytest.mark.parametrize(
    ("result", "expected", "is_same"),
    [
        (1_000_000_007, 1_000_000_007, True),
        (1_000_000_000, 1_000_000_007, False),
        (1e9, 1_000_000_007, False),
        (1_000_000_000, 1_000_000_007.0, False),
        (1_000_000_007.0, 1_000_000_007, True),
        ([[1, 10**9]], [[1, 10**9 + 1]], False),
        ({"a": 10**7}, {"a": 10**7 + 1}, False),
        (10**20, 10**20 + 1, False),
        (0.1 + 0.2, 0.3, True),
        (2.9999999999, 3, True),
        (3, 3.0000000001, True),
        (3.00001, 3, False),
        (1e9, 1e9 + 7, True),
        (True, 1.0, False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1, False),
        (float("nan"), 1, False),
    ],
)
def test_integers_are_compared_exactly_and_floats_within_a_tolerance(result: Any, expected: Any, is_same: bool) -> None:
    assert is_same_result(result, expected) is is_same


DEEP = "import sys\nsys.setrecursionlimit(10**6)\ndef f(x):\n  a = []\n  for _ in range({depth}): a = [a]\n  return a"
BRACKETS = "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'[' * 200000)\n  except OSError: pass\nos._exit(0)"


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return 10**400",
        "def f(x): return -10**400",
        "def f(x): return {'a': [float('inf'), 10**5000]}",
        *(DEEP.format(depth=depth) for depth in (700, 900, 5000)),
        BRACKETS,
        "import os\nos.kill(os.getpid(), 40)",
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("expected", [1.5, [[1.5]]])
def test_whatever_a_function_returns_is_judged(program: str, expected: Any) -> None:
    verdict = judge_program(program, CodeTests(function="f", inputs=([1],), outputs=(expected,)))
    assert verdict.num_passed == 0 and verdict.reason
