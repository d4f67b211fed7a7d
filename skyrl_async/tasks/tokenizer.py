"""Trains the tokenizer of a tiny policy: byte-level BPE with a few hundred entries, one token per digit, ChatML with tools.

Function tools are written as in hermes, shortened: one line names them and their parameters, a call is ``<tool_call>`` around a JSON
object, a result is a turn of role ``tool``.
"""

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import Tool
from skyrl_async.types import Message

START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
MAX_VOCAB_SIZE = 384
LONG_PROMPT_CHARS = 1000
"""A prompt of at least so many characters is a harness's. What all of them begin with is one token, and so is what conversations repeat."""
MIN_PHRASE_CHARS = 12
MIN_PHRASE_SHARE = 0.05
"""Least length of such a phrase, without digits and newlines, and least share of the texts that have it."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}"
    "{{ ' ' + tool.function.name + '(' + ((tool.function.parameters or {}).properties or {}) | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_APART = re.compile(r"\d|\n")
_ROLES = ("system", "user", "assistant", "tool")


def train_tokenizer(texts: Iterable[str], tools: Sequence[Tool] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer for ``texts`` and for calls of ``tools``; the same arguments give the same tokenizer.

    Digits and newlines are tokens of their own, so that no token crosses the boundary of a turn: the tokens of a conversation are those
    of its pieces. The fixed text of a call up to each argument is one token, so that a call takes only a few tokens. So are the phrases
    that the conversations with a harness repeat, and its opening, which may have thousands of characters.
    """
    texts = list(texts)
    phrases = _harness_phrases(texts)
    backend = Tokenizer(models.BPE())
    apart = pre_tokenizers.Split(Regex(_APART.pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([apart, as_bytes])
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in (PAD_TOKEN, START_TOKEN, END_TOKEN)]
    call_words = _call_words(tools)
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE - len(call_words),
        min_frequency=2,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    line_texts = [_tools_line(tools)] * 2 if tools else []
    role_texts = [role for role in _ROLES for _ in range(2)]
    other_texts = [functools.reduce(lambda left, word: left.replace(word, ""), phrases, text) for text in texts]
    backend.train_from_iterator([*role_texts, *line_texts, *other_texts], trainer=trainer)
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in [*call_words, *phrases]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> tuple[list[int], list[int]]:
    """Return the token ids that the chat template gives ``messages``, and a mask that is 1 for the assistant's tokens.

    The assistant's tokens are its content, its tool calls and ``<|im_end|>``.
    """
    pieces = [(f"{START_TOKEN}system\n{_tools_line(tools)}{END_TOKEN}\n", 0)] if tools else []
    for message in messages:
        opening, turn = f"{START_TOKEN}{message['role']}\n", f"{_turn_text(message)}{END_TOKEN}"
        pieces += [(opening, 0), (turn, int(message["role"] == "assistant")), ("\n", 0)]
    token_ids: list[int] = []
    mask: list[int] = []
    for text, in_loss in pieces:
        piece_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        token_ids += piece_ids
        mask += [in_loss] * len(piece_ids)
    return token_ids, mask


def _harness_phrases(texts: Sequence[str]) -> list[str]:
    """Return the lines that all long prompts begin with, as one text, and phrases that many texts have; nothing without long prompts."""
    prompts = [text for text in texts if len(text) >= LONG_PROMPT_CHARS]
    if not prompts:
        return []
    opening, _, _ = os.path.commonprefix(prompts).rpartition("\n")  # noqa: RUF071 (they are no paths)
    counts = Counter(phrase for text in texts for phrase in set(_APART.split(text.removeprefix(opening))))
    least = MIN_PHRASE_SHARE * len(texts)
    phrases = sorted(phrase for phrase, count in counts.items() if len(phrase) >= MIN_PHRASE_CHARS and count >= least)
    return [opening, *phrases] if opening else phrases


def _tools_line(tools: Sequence[Tool]) -> str:
    names = (f"{tool['function']['name']}({', '.join(_parameter_names(tool))})" for tool in tools)
    return " ".join(["Tools:", *names])


def _parameter_names(tool: Tool) -> list[str]:
    parameters: Mapping[str, Any] = tool["function"].get("parameters") or {}
    return list(parameters.get("properties") or {})


def _turn_text(message: Message) -> str:
    calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{CALL_START}\n{{"name": "{function["name"]}", "arguments": {written}}}\n{CALL_END}'


def _call_words(tools: Sequence[Tool]) -> list[str]:
    """Return the texts that become one token each: markers, and the texts before, between and after the numbers of a call."""
    words = {CALL_START: None, CALL_END: None, "}}": None} if tools else {}
    for tool in tools:
        name, parameters = tool["function"]["name"], _parameter_names(tool)
        opening = f'{{"name": "{name}", "arguments": {{'
        for i, parameter in enumerate(parameters):
            words[f'{", " if i else opening}"{parameter}": '] = None
    return list(words)
