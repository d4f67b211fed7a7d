"""Chat rendering on a byte-level BPE, with Hugging Face templates in miniature."""

import re
from collections.abc import Callable
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import ChatRenderer, Tool, normalise_messages
from skyrl_async.columns import begins_with, token_ids
from skyrl_async.errors import ConfigError
from skyrl_async.types import Message
from tests.cpu.chat_templates import llama3, mistral, qwen3, qwen25
from tests.cpu.tiny_chat import CHATML, END, RENDERER, TOKENIZER, make_tokenizer

TRIMMING = CHATML.replace("m.content", "m.content | trim")
SPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} <|im_end|>"
    "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
)
FORGETS_REASONING = CHATML.replace("m.content", "m.content.split('</think>')[-1]") + "<think>"


CONVERSATION: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "whatever"},
    {"role": "user", "content": "again"},
]


TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call(name: str, arguments: object) -> dict[str, object]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}


AGENT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [call("call_0123456789abcdef", '{"city": "Köln"}')]},
    {"role": "tool", "tool_call_id": "call_0123456789abcdef", "name": "look", "content": "cold"},
    {"role": "assistant", "content": "It is cold."},
    {"role": "user", "content": "again"},
]
"""Covered through its tool calls, the answer behind them is one that nobody sampled."""

MakeTokenizer = Callable[[], PreTrainedTokenizerFast]

FAMILIES = pytest.mark.parametrize("make", [qwen25, qwen3, llama3, mistral])


@cache
def family(make: MakeTokenizer) -> tuple[ChatRenderer, int]:
    tokenizer = make()
    return ChatRenderer(tokenizer), tokenizer.eos_token_id


def sampled(renderer: ChatRenderer, messages: list[Message], end: int) -> tuple[int, ...]:
    """The last message with its end of turn, as a policy that knows the template would sample it."""
    before = renderer.render(messages[:-1], tools=TOOLS)
    after = renderer.render(messages, tools=TOOLS, add_generation_prompt=False)
    assert begins_with(after, before)
    *_, last_end = np.flatnonzero(after == end)
    return tuple(after[len(before) : last_end + 1].tolist())


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_token_ids_are_read_only_columns() -> None:
    for column in (RENDERER.render(CONVERSATION), RENDERER.render_next(CONVERSATION, [7]), RENDERER.text_ends([7])):
        assert column.dtype == np.int32 and not column.flags.writeable


def test_rendering_is_the_templates_own() -> None:
    expected = TOKENIZER.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert RENDERER.render(CONVERSATION).tolist() == expected
    without_prompt = TOKENIZER.apply_chat_template(CONVERSATION, return_dict=False)
    assert RENDERER.render(CONVERSATION, add_generation_prompt=False).tolist() == without_prompt


def test_a_tail_does_not_repeat_the_end_of_turn_that_was_sampled() -> None:
    tail = encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    assert RENDERER.render_next(CONVERSATION, (7, 8, END)).tolist() == [7, 8, END, *tail]


def test_a_tail_supplies_the_end_of_turn_of_a_cut_completion() -> None:
    tail = encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    assert RENDERER.render_next(CONVERSATION, (7, 8)).tolist() == [7, 8, END, *tail]


def test_another_special_token_at_the_end_is_not_taken_for_the_end_of_turn() -> None:
    pad = TOKENIZER.pad_token_id
    assert RENDERER.render_next(CONVERSATION, (7, pad))[:3].tolist() == [7, pad, END]


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@given(texts=st.lists(st.text(max_size=12).map(str.strip), min_size=1, max_size=3), question=st.text(max_size=8))
def test_a_continued_prompt_equals_the_whole_rendering_when_sampling_matches_the_tokenizer(
    template: str, texts: list[str], question: str
) -> None:
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    messages: list[Message] = [{"role": "user", "content": question}]
    ids = renderer.render(messages)
    for text in texts:
        ids = (*ids, *encode(text), END)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        ids = renderer.render_next(messages, ids)
    assert ids.tolist() == renderer.render(messages).tolist()


def test_white_space_before_the_end_of_turn_goes_with_it() -> None:
    renderer = ChatRenderer(make_tokenizer(SPACED))
    assert renderer.render_next(CONVERSATION, (7, END)).tolist() == [7, END, *encode("[INST] again [/INST]")]


def test_reasoning_that_the_template_would_drop_stays_as_it_was_sampled() -> None:
    renderer = ChatRenderer(make_tokenizer(FORGETS_REASONING))
    sampled = token_ids([*renderer.render(CONVERSATION[:1]), *encode("hm</think>whatever"), END])
    continued = renderer.render_next(CONVERSATION, sampled)
    assert begins_with(continued, sampled)
    assert TOKENIZER.decode(continued).endswith("again<|im_end|>\n<|im_start|>assistant\n<think>")


def test_the_tail_of_a_last_assistant_message_is_its_end_and_the_generation_prompt() -> None:
    assert tuple(RENDERER.render_next(CONVERSATION[:2], ())) == encode("<|im_end|>\n<|im_start|>assistant\n")


@FAMILIES
def test_tools_and_tool_calls_are_rendered_as_the_template_writes_them(make: MakeTokenizer) -> None:
    renderer = ChatRenderer(make())
    text = renderer.decode(renderer.render(AGENT, tools=TOOLS))
    assert '"description": "Weather of a city."' in text
    assert '{"city": "Köln"}' in text
    assert "Weather" not in renderer.decode(renderer.render(AGENT))


@FAMILIES
@pytest.mark.parametrize("num_covered", [3, 5])
def test_a_tail_is_what_the_template_writes_behind_the_covered_turn(make: MakeTokenizer, num_covered: int) -> None:
    renderer = ChatRenderer(make())
    whole = renderer.decode(renderer.render(AGENT, tools=TOOLS))
    tail = renderer.decode(renderer.render_next(AGENT, (), num_covered=num_covered, tools=TOOLS))
    assert whole.endswith(tail)
    assert tail.startswith(renderer.decode([make().eos_token_id]))
    assert whole.removesuffix(tail).endswith(("}}\n</tool_call>", "}}", "}]") if num_covered == 3 else "It is cold.")
    assert ("It is cold." in tail) == (num_covered == 3)


@pytest.mark.parametrize("make", [qwen25, llama3])
@given(cities=st.lists(st.text(max_size=6), min_size=1, max_size=3), answer=st.text(max_size=8).map(str.strip))
def test_a_conversation_with_tools_continued_turn_by_turn_equals_its_whole_rendering(
    make: MakeTokenizer, cities: list[str], answer: str
) -> None:
    renderer, end = family(make)
    messages: list[Message] = [{"role": "user", "content": "hello"}]
    ids = renderer.render(messages, tools=TOOLS)
    for i, city in enumerate(cities):
        messages.append({"role": "assistant", "content": None, "tool_calls": [call(f"c{i}", {"city": city})]})
        ids = (*ids, *sampled(renderer, messages, end))
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": answer})
        ids = renderer.render_next(messages, ids, tools=TOOLS)
    assert renderer.decode(ids) == renderer.decode(renderer.render(messages, tools=TOOLS))


@FAMILIES
def test_sampled_tokens_stay_and_get_their_end_of_turn_unless_it_was_sampled(make: MakeTokenizer) -> None:
    tokenizer = make()
    renderer = ChatRenderer(tokenizer)
    for covered in (3, 5):
        cut = renderer.render_next(AGENT, (7, 8), num_covered=covered, tools=TOOLS)
        ended = renderer.render_next(AGENT, (7, 8, tokenizer.eos_token_id), num_covered=covered, tools=TOOLS)
        assert cut.tolist() == ended.tolist()
        assert cut[:3].tolist() == [7, 8, tokenizer.eos_token_id]


def test_a_stop_string_in_the_sampled_tokens_stays_before_the_end_of_turn() -> None:
    renderer = ChatRenderer(qwen25())
    prompt = renderer.render(AGENT[:2])
    completion = (*encode("ls</bash>"),)
    following = [*AGENT[:2], {"role": "assistant", "content": "ls"}, {"role": "user", "content": "a.txt"}]
    continued = renderer.decode(renderer.render_next(following, (*prompt, *completion)))
    assert continued.endswith("ls</bash><|im_end|>\n<|im_start|>user\na.txt<|im_end|>\n<|im_start|>assistant\n")


def test_reasoning_that_the_template_drops_stays_where_it_was_sampled() -> None:
    renderer = ChatRenderer(qwen3())
    prompt = renderer.render(AGENT[:2], tools=TOOLS)
    completion = encode('<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    continued = renderer.render_next(AGENT, (*prompt, *completion), num_covered=3, tools=TOOLS)
    assert begins_with(continued, token_ids([*prompt, *completion]))
    tail = renderer.decode(continued[len(prompt) + len(completion) :])
    assert tail == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\ncold\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is cold.<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_wants_tool_calls_before_tool_results_is_continued_behind_them() -> None:
    renderer = ChatRenderer(mistral())
    with pytest.raises(ValueError, match="a tool result must follow a tool call"):
        renderer.render([*AGENT[:2], {"role": "assistant", "content": "x"}, AGENT[3]])
    ended = (renderer.tokenizer.eos_token_id,)
    tail = renderer.decode(renderer.render_next(AGENT, ended, num_covered=3)).removeprefix("</s>")
    assert tail.startswith('[TOOL_RESULTS] {"content": "cold", "call_id": "')
    assert tail.endswith(" It is cold.</s>[INST] Be brief.\n\nagain[/INST]")


def test_ids_that_a_template_refuses_are_shortened_and_still_match() -> None:
    renderer = ChatRenderer(mistral())
    text = renderer.decode(renderer.render(AGENT))
    (short,) = set(re.findall(r'"(?:call_)?id": "(\w+)"', text))
    assert len(short) == 9
    fitting = [{**m, "tool_call_id": "abcdefghi"} if m["role"] == "tool" else m for m in AGENT]
    fitting[2] = {**AGENT[2], "tool_calls": [call("abcdefghi", "{}")]}
    assert '"call_id": "abcdefghi"' in renderer.decode(renderer.render(fitting))


def test_arguments_are_text_for_a_template_that_joins_them_to_text() -> None:
    joining = CHATML.replace("m.content", "m.tool_calls[0].function.arguments + '!' if m.tool_calls else m.content")
    renderer = ChatRenderer(make_tokenizer(joining))
    assert '{"city": "Köln"}!<|im_end|>' in renderer.decode(renderer.render(AGENT))
    assert '{"city": "Köln"}!' not in renderer.decode(renderer.render_next(AGENT, (7,), num_covered=3))


def test_a_template_whose_turns_of_tool_calls_end_otherwise_cannot_be_continued() -> None:
    odd = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}"
        "{{ (m.tool_calls | tojson) + '<|endoftext|>' if m.tool_calls else m.content + '<|im_end|>' }}{% endfor %}"
    )
    renderer = ChatRenderer(make_tokenizer(odd))
    with pytest.raises(ConfigError, match="must end a turn of tool calls"):
        renderer.render_next(AGENT[:4], (7,))


@pytest.mark.parametrize("num_covered", [0, 1, 2, 7])
def test_covered_messages_must_end_in_an_assistant_message(num_covered: int) -> None:
    with pytest.raises(ValueError, match=f"num_covered must end in an assistant message, got {num_covered} of 6"):
        RENDERER.render_next(AGENT, (7,), num_covered=num_covered)


def test_null_content_text_parts_and_the_developer_role_are_normalised() -> None:
    found = normalise_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
            {"role": "user"},
        ]
    )
    assert found == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ('{"city": "Köln"}', {"city": "Köln"}),
        ("", {}),
        (None, {}),
        ({"city": "x"}, {"city": "x"}),
        ("[1, 2]", "[1, 2]"),
        ('{"city": ', '{"city": '),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_objects_where_their_text_spells_one(written: object, rendered: object) -> None:
    (found,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call("c", written)]}])
    assert found == {"role": "assistant", "content": "", "tool_calls": [call("c", rendered)]}


def test_reasoning_is_passed_under_the_name_that_templates_know() -> None:
    (found,) = normalise_messages([{"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": None}])
    assert found["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"content": "x"}, r"messages\[0\].role"),
        ({"role": "user", "content": 3}, r"messages\[0\].content .* got int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'"),
        ({"role": "user", "content": ["text"]}, "'str'"),
        ({"role": "assistant", "tool_calls": "look"}, r"messages\[0\].tool_calls must be a list, got str"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, r"messages\[0\].tool_calls\[0\].function.name"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(message: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RENDERER.render([message])


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatRenderer(make_tokenizer(template=None))


def test_a_template_that_loses_the_assistants_words_is_refused_when_it_must_continue() -> None:
    renderer = ChatRenderer(make_tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))
    with pytest.raises(ConfigError, match="exactly once, got 0 times"):
        renderer.render_next(CONVERSATION, (END,))


def test_what_a_template_raises_becomes_one_clear_error() -> None:
    renderer = ChatRenderer(make_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        renderer.render(CONVERSATION)


def test_continuing_needs_an_assistant_message() -> None:
    with pytest.raises(ValueError, match="assistant message to continue from"):
        RENDERER.render_next(CONVERSATION[:1], (END,))


@given(st.text(max_size=30))
def test_the_bytes_of_tokens_joined_are_the_text(text: str) -> None:
    ids = encode(text)
    assert b"".join(map(RENDERER.token_bytes, ids)) == text.encode()
    sizes = [len(RENDERER.token_bytes(i)) for i in ids]
    assert RENDERER.text_ends((*ids, END)).tolist() == [*accumulate(sizes), sum(sizes)]
    spelled_out = RENDERER.text_ends((END, *ids), skip_special_tokens=False)
    assert spelled_out[-1] == len(RENDERER.decode((END, *ids)).encode())
    assert sum(sizes) == len(text.encode())


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12))
def test_the_ends_of_any_tokens_are_places_in_the_text_that_is_decoded_from_them(ids: list[int]) -> None:
    ends = RENDERER.text_ends(ids, skip_special_tokens=False)
    assert len(ends) == len(ids) and ends[-1:].tolist() == [len(RENDERER.decode(ids).encode())][: len(ids)]


def test_bytes_that_are_no_characters_take_the_place_of_what_stands_for_them() -> None:
    """A tool call behind them would keep tokens that follow it, or all of them."""
    broken = [i for i in range(len(TOKENIZER)) if RENDERER.token_bytes(i) == b"\xff"] * 2
    ids = [*broken, *encode("hi!"), *encode("xyz")]
    assert RENDERER.text_ends(ids)[len(broken) + len(encode("hi!")) - 1] == len("\ufffd\ufffdhi!".encode())


def test_the_stop_string_that_ended_a_completion_is_found_in_its_tokens() -> None:
    ids = encode("hello</answer>")
    assert RENDERER.stop_string(ids, "hello", ("</x>", "</answer>")) == "</answer>"
    assert RENDERER.stop_string(ids, "hello</answer>", ("</answer>",)) is None
    assert RENDERER.stop_string(ids, "hello", ()) is None
    assert RENDERER.stop_string(ids, "hello", ("</answer>", "</answer", "</an")) == "</an", "the first to be complete"


def test_a_stop_string_is_found_where_decoding_drops_a_first_space_that_the_engine_keeps() -> None:
    """As the tokenizers of Llama 2 and Mistral do; vLLM decodes after the prompt."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ids, renderer = encode(" hello</answer>"), ChatRenderer(tokenizer)
    assert renderer.decode(ids) == "hello</answer>"
    prompt = DecodeStream(ids=list(encode("user: ")))
    text = "".join(filter(None, (prompt.step(tokenizer.backend_tokenizer, i) for i in ids))).removesuffix("</answer>")
    assert (text, renderer.stop_string(ids, text, ("</answer>",))) == (" hello", "</answer>")
    assert renderer.text_ends(ids)[-1] == len(" hello</answer>")


def test_a_stop_string_is_found_in_a_text_that_spells_special_tokens() -> None:
    ids = encode("<|im_start|>hello</answer>")
    assert RENDERER.stop_string(ids, "<|im_start|>hello", ("</answer>",)) == "</answer>"
    assert RENDERER.stop_string(ids, "hello", ("</answer>",)) == "</answer>"
