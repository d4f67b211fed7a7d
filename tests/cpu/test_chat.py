"""Chat rendering on a byte-level BPE, with Hugging Face templates in miniature."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.chat import ChatRenderer, normalise_messages
from skyrl_async.errors import ConfigError
from tests.cpu.tiny_chat import CHATML, END, RENDERER, TOKENIZER, make_tokenizer

TRIMMING = CHATML.replace("m.content", "m.content | trim")
SPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} <|im_end|>"
    "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
)
FORGETS_REASONING = CHATML.replace("m.content", "m.content.split('</think>')[-1]") + "<think>"


CONVERSATION = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "whatever"},
    {"role": "user", "content": "again"},
]


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_rendering_is_the_templates_own() -> None:
    expected = TOKENIZER.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert RENDERER.render(CONVERSATION) == tuple(expected)
    without_prompt = TOKENIZER.apply_chat_template(CONVERSATION, return_dict=False)
    assert RENDERER.render(CONVERSATION, add_generation_prompt=False) == tuple(without_prompt)


def test_a_tail_does_not_repeat_the_end_of_turn_that_was_sampled() -> None:
    tail = RENDERER.render_tail(CONVERSATION, last_completion_ended=True)
    assert tail == encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")


def test_a_tail_supplies_the_end_of_turn_of_a_cut_completion() -> None:
    assert RENDERER.render_tail(CONVERSATION, last_completion_ended=False) == (
        END,
        *RENDERER.render_tail(CONVERSATION, last_completion_ended=True),
    )


def test_the_next_prompt_looks_at_the_last_token_to_see_whether_the_turn_ended() -> None:
    tail = RENDERER.render_tail(CONVERSATION, last_completion_ended=True)
    assert RENDERER.render_next(CONVERSATION, (7, 8, END)) == (7, 8, END, *tail)
    assert RENDERER.render_next(CONVERSATION, (7, 8)) == (7, 8, END, *tail)


def test_another_special_token_at_the_end_is_not_taken_for_the_end_of_turn() -> None:
    pad = TOKENIZER.pad_token_id
    assert RENDERER.render_next(CONVERSATION, (7, pad))[:3] == (7, pad, END)


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@given(texts=st.lists(st.text(max_size=12).map(str.strip), min_size=1, max_size=3), question=st.text(max_size=8))
def test_a_continued_prompt_equals_the_whole_rendering_when_sampling_matches_the_tokenizer(
    template: str, texts: list[str], question: str
) -> None:
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    messages = [{"role": "user", "content": question}]
    ids = renderer.render(messages)
    for text in texts:
        ids = (*ids, *encode(text), END)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        ids = renderer.render_next(messages, ids)
    assert ids == renderer.render(messages)


def test_white_space_before_the_end_of_turn_goes_with_it() -> None:
    renderer = ChatRenderer(make_tokenizer(SPACED))
    assert renderer.render_tail(CONVERSATION, last_completion_ended=True) == encode("[INST] again [/INST]")
    assert renderer.render_next(CONVERSATION, (7, END)) == (7, END, *encode("[INST] again [/INST]"))


def test_reasoning_that_the_template_would_forget_stays_as_it_was_sampled() -> None:
    renderer = ChatRenderer(make_tokenizer(FORGETS_REASONING))
    sampled = (*renderer.render(CONVERSATION[:1]), *encode("hm</think>whatever"), END)
    continued = renderer.render_next(CONVERSATION, sampled)
    assert continued[: len(sampled)] == sampled
    assert TOKENIZER.decode(continued).endswith("again<|im_end|>\n<|im_start|>assistant\n<think>")


def test_the_tail_of_a_last_assistant_message_is_its_end_and_the_generation_prompt() -> None:
    tail = RENDERER.render_tail(CONVERSATION[:2], last_completion_ended=False)
    assert tail == encode("<|im_end|>\n<|im_start|>assistant\n")


def test_null_content_text_parts_and_the_developer_role_are_normalised() -> None:
    found = normalise_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user"},
        ]
    )
    assert found == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"content": "x"}, r"messages\[0\].role"),
        ({"role": "user", "content": 3}, r"messages\[0\].content .* got int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'"),
        ({"role": "user", "content": ["text"]}, "'str'"),
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
        renderer.render_tail(CONVERSATION, last_completion_ended=True)


def test_what_a_template_raises_becomes_one_clear_error() -> None:
    renderer = ChatRenderer(make_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        renderer.render(CONVERSATION)


def test_continuing_needs_an_assistant_message() -> None:
    with pytest.raises(ValueError, match="assistant message to continue from"):
        RENDERER.render_tail(CONVERSATION[:1], last_completion_ended=True)


@given(st.text(max_size=30))
def test_the_bytes_of_tokens_joined_are_the_text(text: str) -> None:
    ids = encode(text)
    assert b"".join(map(RENDERER.token_bytes, ids)) == text.encode()
    assert RENDERER.text_ends((*ids, END))[-1:] == (len(text.encode()),)


def test_the_stop_string_that_ended_a_completion_is_found_in_its_tokens() -> None:
    ids = encode("hello</answer>")
    assert RENDERER.stop_string(ids, "hello", ("</x>", "</answer>")) == "</answer>"
    assert RENDERER.stop_string(ids, "hello</answer>", ("</answer>",)) is None
    assert RENDERER.stop_string(ids, "hello", ()) is None
