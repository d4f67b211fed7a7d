"""Answers taken apart: splitting by itself, and vLLM's own parsers on families of models in miniature."""

import json
import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import ChatRenderer, Tool
from skyrl_async.columns import NO_TOKENS, token_ids
from skyrl_async.endpoint.parsing import answer_parser
from skyrl_async.endpoint.parsing.answer_parser import (
    REASONING_PARSERS,
    TOOL_FORMATS,
    AnswerParser,
    reasoning_parser_for,
    tool_parser_for,
)
from skyrl_async.endpoint.parsing.answers import AnswerParts, AnswerStream, Marks, make_tool_call
from skyrl_async.endpoint.parsing.output_parser import forced_call, output_parser_of
from skyrl_async.errors import ConfigError
from skyrl_async.inference.vllm.parsers import FoundCalls, VLLMReasoningParser, VLLMToolParser
from tests.cpu.chat_templates import LLAMA3, MISTRAL, QWEN3, QWEN25, llama3, mistral, qwen3, qwen25
from tests.cpu.tiny_chat import CHATML, TOKENIZER, make_tokenizer, parsed

TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Weather of a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]

CODER = QWEN25.replace("</tools>", "</tools> as <function=name>")
MARKS = Marks(reasoning=("<think>", "</think>"), calls=("<call>",), calls_ending_reasoning=("<call>",))
HERMES = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln"}}\n</tool_call>'

Summary = tuple[str | None, str | None, list[tuple[str, str]]]


def summary(answer: AnswerParts) -> Summary:
    """What an answer says, without the ids of its calls."""
    content = answer.content or (None if answer.tool_calls else "")
    return content, answer.reasoning or None, [(call.name, call.arguments) for call in answer.tool_calls]


def coder() -> PreTrainedTokenizerFast:
    return make_tokenizer(CODER, added_tokens=("<tool_call>", "</tool_call>"))


@cache
def parser_of(make: Callable[[], PreTrainedTokenizerFast]) -> AnswerParser:
    return AnswerParser.of(make())


def read_calls(text: str) -> AnswerParts | None:
    """Stands for a model's format: ``<call>name;`` is a call, any other text is none."""
    name, separator, rest = text.removeprefix("<call>").partition(";")
    return AnswerParts(content=rest, tool_calls=(make_tool_call(name, "{}"),)) if separator else None


def split(
    text: str, marks: Marks = MARKS, *, starts_in_reasoning: bool = False, cuts: list[int] | None = None
) -> Summary:
    """``text`` through a stream, in blocks that end at ``cuts``."""
    stream = AnswerStream(marks, read_calls=read_calls, starts_in_reasoning=starts_in_reasoning)
    return summary(joined(stream, text, cuts or []) + stream.finish())


def joined(stream: AnswerStream, text: str, cuts: list[int]) -> AnswerParts:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    delta = AnswerParts()
    for start, end in pairwise(bounds):
        delta += stream.push(text[start:end])
    return delta


def texts_of(*pieces: str) -> st.SearchStrategy[str]:
    """Marks and well-formed pieces, whole and cut, among garbage."""
    part = st.sampled_from([*pieces, "\n", " ", "{", "}", '"', "<", "é", "猫", "\\", "null"])
    cut = st.sampled_from(pieces).flatmap(lambda piece: st.integers(0, len(piece)).map(lambda n: piece[:n]))
    return st.lists(st.one_of(part, cut, st.text(max_size=4)), max_size=8).map("".join)


CUTS = st.lists(st.integers(0, 10_000), max_size=6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hi", ("hi", None, [])),
        ("", ("", None, [])),
        (" \n", (" \n", None, [])),
        ("<think>\nhm\n</think>\n\nhi", ("hi", "hm", [])),
        (" <think>hm", ("", "hm", [])),
        ("a <think>b</think>", ("a <think>b</think>", None, [])),
        ("hm</think>hi", ("hm</think>hi", None, [])),
        ("<think></think>hi", ("hi", None, [])),
        ("hi\n<call>f;", ("hi\n", None, [("f", "{}")])),
        ("\n <call>f;\n", (None, None, [("f", "{}")])),
        ("<think>hm</think>\n<call>f;", (None, "hm", [("f", "{}")])),
        ("<think>hm\n<call>f;", (None, "hm", [("f", "{}")])),
        ("\n<call>f", ("\n<call>f", None, [])),
        ("<call>f; then", (" then", None, [("f", "{}")])),
        ("a <cal", ("a <cal", None, [])),
    ],
)
def test_an_answer_is_reasoning_then_words_then_calls(text: str, expected: Summary) -> None:
    assert split(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hm\n</think>\n\nhi", ("hi", "hm", [])),
        ("\nhm", ("", "hm", [])),
        ("<think>hm</think>hi", ("hi", "hm", [])),
        ("hm</thi", ("", "hm</thi", [])),
        ("<th", ("", "<th", [])),
    ],
)
def test_an_answer_begins_in_reasoning_where_the_prompt_has_opened_it(text: str, expected: Summary) -> None:
    assert split(text, starts_in_reasoning=True) == expected


def test_without_tools_a_call_is_words() -> None:
    assert split("<think>a<call>b</think><call>f;", MARKS.without_calls()) == ("<call>f;", "a<call>b", [])


@pytest.mark.slow
@given(text=texts_of("<think>", "</think>", "<call>", "f;", "\n\n"), starts=st.booleans(), cuts=CUTS)
def test_an_answer_is_the_same_for_any_blocks(text: str, starts: bool, cuts: list[int]) -> None:
    for marks in (MARKS, MARKS.without_calls(), Marks(calls=("<call>", "<c")), Marks(calls=("",))):
        whole = split(text, marks, starts_in_reasoning=starts)
        assert split(text, marks, starts_in_reasoning=starts, cuts=cuts) == whole


@given(text=texts_of("</think>", "<call>"))
def test_an_answer_without_calls_keeps_every_word(text: str) -> None:
    assert split(text) == (text, None, [])


def test_a_stream_passes_on_what_is_certain_at_once() -> None:
    stream = AnswerStream(MARKS, read_calls=read_calls)
    blocks = ["<thi", "nk>", "a\n", "b", "\n</th", "ink>\n", "c", " <", "d <ca", "ll>f", ";"]
    deltas = [stream.push(block) for block in blocks]
    assert [delta.reasoning for delta in deltas] == ["", "", "a", "\nb", "", "", "", "", "", "", ""]
    assert [delta.content for delta in deltas] == ["", "", "", "", "", "", "c", " ", "<d ", "", ""]
    assert [call.name for call in stream.finish().tool_calls] == ["f"]


def test_where_calls_may_begin_anywhere_nothing_is_certain_before_the_end() -> None:
    stream = AnswerStream(Marks(calls=("",)), read_calls=lambda _: None)
    assert stream.push("words") == AnswerParts()
    assert stream.finish() == AnswerParts(content="words")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN25, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (CODER, "qwen3_coder", None),
        (LLAMA3, "llama3_json", None),
        (MISTRAL, "mistral", None),
        (CHATML, None, None),
    ],
)
def test_the_chat_template_says_how_its_model_answers(template: str, tools: str | None, reasoning: str | None) -> None:
    assert tool_parser_for(template) == tools
    assert reasoning_parser_for(template) == reasoning


def test_no_beginning_of_a_call_begins_inside_another() -> None:
    for form in TOOL_FORMATS:
        inside = [(a, b) for a in form.call_starts for b in form.call_starts if a != b and b in a]
        assert inside == []


def test_a_template_without_marks_is_not_parsed_and_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(answer_parser, "load_tool_parser")
    monkeypatch.delattr(answer_parser, "load_reasoning_parser")
    for parser in (AnswerParser(TOKENIZER), AnswerParser(qwen3())):
        assert summary(parsed(parser, HERMES, tools=TOOLS)) == (HERMES, None, [])
        assert not parser.keeps_special_tokens
        assert not parser.starts_in_reasoning((1, 2))


class Broken(Exception):
    """What a parser may raise."""


def broken_tools(text: str, tools: object) -> FoundCalls:
    raise Broken(text)


def broken_reasoning(text: str) -> tuple[str, str]:
    raise Broken(text)


def test_an_answer_whose_parser_fails_is_content_and_the_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parser = AnswerParser(
        TOKENIZER,
        tools=VLLMToolParser(name="hermes", extract=broken_tools, wants_special_tokens=False),
        reasoning=VLLMReasoningParser(name="own", extract=broken_reasoning, start=None, end=None),
    )
    for _ in range(3):
        assert summary(parsed(parser, f"a {HERMES}", tools=TOOLS)) == (f"a {HERMES}", None, [])
    logged = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in logged] == [logging.WARNING] * 2
    assert "parser own, Broken" in logged[0][1]
    assert "parser hermes, Broken" in logged[1][1]


@pytest.mark.parametrize(
    "calls", [(("", "{}"),), (("look", "{"),), (("look", "{}"), ("stop", '{"a": ')), (), (("look", "[" * 100_000),)]
)
def test_calls_that_are_not_whole_are_content(calls: tuple[tuple[str, str], ...]) -> None:
    found = FoundCalls(calls=calls, content="lost")
    tools = VLLMToolParser(name="own", extract=lambda text, tools: found, wants_special_tokens=True)
    parser = AnswerParser(TOKENIZER, tools=tools)
    assert summary(parsed(parser, " raw", tools=TOOLS)) == (" raw", None, [])
    assert parser.keeps_special_tokens


def test_reasoning_without_marks_is_found_in_the_whole_text() -> None:
    def halve(text: str) -> tuple[str, str]:
        reasoning, _, content = text.partition("Answer:")
        return reasoning, content

    reasoning = VLLMReasoningParser(name="own", extract=halve, start=None, end=None)
    stream = AnswerParser(TOKENIZER, reasoning=reasoning).stream(tools=None)
    assert stream.push("hm Answer:") == AnswerParts()
    assert stream.push("42") == AnswerParts()
    assert stream.finish() == AnswerParts(reasoning="hm ", content="42")


CASES = [
    (qwen25, f"hi\n{HERMES}\n{HERMES}", "hi\n", 2),
    (qwen25, HERMES.removesuffix("\n</tool_call>"), None, 1),
    (qwen25, HERMES.replace('{"city": "Köln"}', '{"city": {"a": [1, {"b": "}"}]}}'), None, 1),
    (qwen3, f"<think>\nhm\n</think>\n\n{HERMES}", None, 1),
    (qwen3, f"<think>\nhm\n{HERMES}", None, 1),
    (coder, "<tool_call>\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>", None, 1),
    (llama3, '{"name": "look", "parameters": {"city": "Köln"}}', None, 1),
    (llama3, 'So: <|python_tag|>{"name": "look", "parameters": {"city": "Köln"}}', "So: ", 1),
    (mistral, '[TOOL_CALLS] [{"name": "look", "arguments": {"city": "Köln"}}]', None, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "text", "content", "num_calls"), CASES)
def test_vllm_finds_the_calls_of_each_family(
    make: Callable[[], PreTrainedTokenizerFast], text: str, content: str | None, num_calls: int
) -> None:
    answer = parsed(parser_of(make), text, tools=TOOLS)
    assert (answer.content or None) == content
    assert answer.reasoning == ("hm" if "hm" in text else "")
    assert [call.name for call in answer.tool_calls] == ["look"] * num_calls
    assert all("city" in json.loads(call.arguments) for call in answer.tool_calls)
    assert len({call.id for call in answer.tool_calls}) == num_calls
    assert all(call.id.startswith("call_") and len(call.id) == 29 for call in answer.tool_calls)
    assert parsed(parser_of(make), text, tools=None).tool_calls == ()


DEEPSEEK = {
    name: "<\uff5ctool\u2581" + name.replace(" ", "\u2581") + "\uff5c>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
ROME = '{"city": "Rome"}'

WRITTEN = {
    "hermes": ((), f'<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>'),
    "qwen3_coder": (
        (),
        "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": ((), "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"),
    "llama3_json": (("<|python_tag|>",), f'<|python_tag|>{{"name": "look", "parameters": {ROME}}}'),
    "mistral": (("[TOOL_CALLS]", "[ARGS]"), f"[TOOL_CALLS]look[ARGS]{ROME}"),
    "deepseek_v3": (
        tuple(DEEPSEEK.values()),
        f"{DEEPSEEK['calls begin']}{DEEPSEEK['call begin']}function{DEEPSEEK['sep']}look\n```json\n{ROME}\n```"
        f"{DEEPSEEK['call end']}{DEEPSEEK['calls end']}",
    ),
    "deepseek_v31": (
        tuple(DEEPSEEK.values()),
        f"{DEEPSEEK['calls begin']}{DEEPSEEK['call begin']}look{DEEPSEEK['sep']}{ROME}"
        f"{DEEPSEEK['call end']}{DEEPSEEK['calls end']}",
    ),
    "kimi_k2": (
        (*KIMI, "<|tool_calls_section_end|>"),
        f"{KIMI[0]}{KIMI[1]}functions.look:0{KIMI[2]}{ROME}{KIMI[3]}<|tool_calls_section_end|>",
    ),
    "minimax_m2": (
        (),
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "seed_oss": (
        (),
        "<seed:tool_call>\n<function=look>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
    ),
}
"""vLLM's parser -> special tokens that it wants, and a call in its format."""


def test_every_format_has_an_example() -> None:
    assert {form.parsers[0] for form in TOOL_FORMATS} == set(WRITTEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_in_an_answer_that_is_cut_is_whole_or_content(name: str) -> None:
    special_tokens, written = WRITTEN[name]
    parser = AnswerParser.of(make_tokenizer(special_tokens=special_tokens), tool_call_parser=name)
    text = f"So: {written}"
    called = ("So: ", None, [("look", ROME)])
    assert summary(parsed(parser, text, tools=TOOLS)) == called
    found = [summary(parsed(parser, text[:length], tools=TOOLS)) for length in range(len(text))]
    assert all(one in (called, (text[:length], None, [])) for length, one in enumerate(found))
    assert parser.keeps_special_tokens == bool(special_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_a_second_call_that_is_cut_does_not_vanish(name: str) -> None:
    special_tokens, written = WRITTEN[name]
    parser = AnswerParser.of(make_tokenizer(special_tokens=special_tokens), tool_call_parser=name)
    for end in ("na", "Ro"):
        text = f"{written}{written[: written.find(end)]}{end}"
        if end in written:
            assert summary(parsed(parser, text, tools=TOOLS)) == (text, None, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (qwen25, '<tool_call>{"name": "look", "arguments": {"city": "K'),
        (qwen25, f'{HERMES}<tool_call>{{"nam'),
        (qwen25, '<tool_call>{"arguments": {}}</tool_call>'),
        (qwen25, "<tool_call>" + "[" * 100_000),
        (coder, "<tool_call>\n<function=look>\n<parameter=city>\nK"),
        (coder, "<tool_call>nothing</tool_call>"),
        (llama3, 'if (x) { return "猫" }'),
        (mistral, '[TOOL_CALLS] [{"name": "look", "argu'),
    ],
)
def test_a_call_that_was_cut_or_miswritten_is_content(make: Callable[[], PreTrainedTokenizerFast], text: str) -> None:
    assert summary(parsed(parser_of(make), f"So: {text}", tools=TOOLS)) == (f"So: {text}", None, [])


PIECES = {
    qwen25: ("<tool_call>", "</tool_call>", HERMES, '{"name": "stop", "arguments": {}}', '{"name": 3}'),
    qwen3: ("<think>", "</think>\n\n", HERMES, "<tool_call>", "</tool_call>"),
    coder: (
        "<tool_call>",
        "<function=look>",
        "<parameter=city>\nKöln\n</parameter>",
        "</function>",
        "</tool_call>",
        "<function=stop></function>",
    ),
    llama3: ("<|python_tag|>", '{"name": "look", "parameters": {"city": "Köln"}}', '{"name": 1}', "; "),
    mistral: ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "look", "arguments": {}}]', "[", "]", ", "),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", PIECES)
@given(data=st.data())
def test_no_text_breaks_vllms_parsers_and_blocks_equal_the_whole(
    make: Callable[[], PreTrainedTokenizerFast], data: st.DataObject
) -> None:
    parser = parser_of(make)
    text = data.draw(texts_of(*PIECES[make]))
    starts = data.draw(st.booleans())
    answer = parsed(parser, text, tools=TOOLS, starts_in_reasoning=starts)
    stream = parser.stream(tools=TOOLS, starts_in_reasoning=starts)
    blocks = joined(stream, text, data.draw(CUTS)) + stream.finish()
    assert summary(blocks) == summary(answer)
    for call in answer.tool_calls:
        assert call.name.strip()
        json.loads(call.arguments)
    if not answer.tool_calls and "<think>" not in text and not (starts and make is qwen3):
        assert answer.content == text


@pytest.mark.slow
@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_by_the_name_of_its_field(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"server\.{field} must be auto, none or one of .*; got 'nobody'"):
        AnswerParser.of(qwen25(), **{field: "nobody"})


@pytest.mark.slow
def test_a_parser_that_cannot_read_this_tokenizers_text_is_refused_unless_auto_chose_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match=r"server\.tool_call_parser must name a parser that can .*got 'llama3_json'"):
        AnswerParser.of(qwen25(), tool_call_parser="llama3_json")
    with pytest.raises(ConfigError, match=r"server\.reasoning_parser must name .*got 'deepseek_r1'"):
        AnswerParser.of(qwen25(), reasoning_parser="deepseek_r1")
    parser = AnswerParser.of(make_tokenizer(LLAMA3))
    assert summary(parsed(parser, '{"name": "stop"}', tools=TOOLS)) == ('{"name": "stop"}', None, [])
    assert "not parsed as the chat template suggests" in caplog.text


@pytest.mark.slow
def test_vllm_knows_every_parser_that_auto_may_choose() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    named = {name for form in TOOL_FORMATS for name in form.parsers}
    assert named <= set(ToolParserManager.list_registered())
    assert {name for _, name in REASONING_PARSERS} <= set(ReasoningParserManager.list_registered())


@pytest.mark.slow
def test_special_tokens_are_kept_in_the_text_only_where_marks_are_special() -> None:
    assert {make.__name__: parser_of(make).keeps_special_tokens for make in PIECES} == {
        "qwen25": False,
        "qwen3": False,
        "coder": False,
        "llama3": True,
        "mistral": True,
    }


@pytest.mark.slow
def test_a_prompt_that_opens_reasoning_is_told_from_one_that_speaks_of_it() -> None:
    tokenizer = qwen3()
    parser, renderer = parser_of(qwen3), ChatRenderer(tokenizer)
    prompt = renderer.render([{"role": "user", "content": "What is <think>"}])
    assert not parser.starts_in_reasoning(prompt)
    assert parser.starts_in_reasoning(token_ids([*prompt, *tokenizer.encode("<think>\n")]))
    assert not parser.starts_in_reasoning(token_ids([*prompt, *tokenizer.encode("<think>\n\n</think>\n\n")]))
    assert not parser.starts_in_reasoning(NO_TOKENS)


def schema_of(tools: list[Tool], tool_choice: str) -> str:
    """The JSON schema of a forced answer."""
    forced = forced_call(tools, tool_choice)
    assert forced is not None and forced.json_schema is not None
    return forced.json_schema


def parsed_forced(text: str, tool_choice: str) -> AnswerParts:
    parser = output_parser_of(
        AnswerParser(TOKENIZER), tools=TOOLS, tool_choice=tool_choice, is_chat=True, starts_in_reasoning=False
    )
    return parser.push(text) + parser.finish()


def test_a_named_function_is_forced_by_its_parameters() -> None:
    assert json.loads(schema_of(TOOLS, "look")) == TOOLS[0]["function"]["parameters"]
    assert json.loads(schema_of(TOOLS, "stop")) == {"type": "object", "properties": {}}
    answer = parsed_forced(' {"city": "Köln"}\n', "look")
    assert summary(answer) == (None, None, [("look", '{"city": "Köln"}')])


def test_required_calls_are_a_list_of_names_and_parameters() -> None:
    text = '[{"name": "look", "parameters": {"city": "猫"}}, {"name": "stop", "parameters": {}}]'
    assert summary(parsed_forced(text, "required")) == (
        None,
        None,
        [("look", '{"city": "猫"}'), ("stop", "{}")],
    )


@pytest.mark.parametrize("name", ["look", "stop", "required"])
def test_the_grammar_of_a_forced_call_is_accepted_by_vllms_engine(name: str) -> None:
    grammar = xgrammar.Grammar.from_json_schema(schema_of(TOOLS, name))
    assert "root" in str(grammar)


def test_definitions_that_parameters_refer_to_are_still_found() -> None:
    parameters = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}},
        "$defs": {"place": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}, *TOOLS]
    schema = json.loads(schema_of(tools, "required"))
    assert schema["$defs"] == {"place": {"type": "string"}}
    assert "$defs" in parameters
    xgrammar.Grammar.from_json_schema(json.dumps(schema))
    other = {"name": "run", "parameters": {"$defs": {"place": {"type": "integer"}}}}
    with pytest.raises(ValueError, match="agree on the definition of 'place'"):
        schema_of([*tools, {"type": "function", "function": other}], "required")


@given(
    text=texts_of('[{"name": "look", "parameters": {}}]', '{"city": "x"}', "[", "]"),
    name=st.sampled_from(["look", "required"]),
)
def test_a_forced_answer_that_was_cut_is_content(text: str, name: str) -> None:
    answer = parsed_forced(text, name)
    assert answer.tool_calls or answer.content == text
    assert parsed_forced("[" * 100_000, name).content == "[" * 100_000


@pytest.mark.parametrize("definitions", [[1], "x", 3])
def test_definitions_that_are_no_object_are_refused(definitions: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": definitions}}}
    with pytest.raises(ValueError, match=r"\$defs of a tool's parameters must be an object, got"):
        schema_of([tool], "required")
