"""Chat messages as token ids, through a tokenizer's own chat template.

Flows in: messages in OpenAI form and the ids of turns already sampled. Flows out: prompt ids, and what tokens spell.
Sampled text is never tokenized again: a later turn's prompt is the ids so far plus the rendered *tail* (contract 4 of
the design). Does not know engines, environments or HTTP.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from skyrl_async.errors import ConfigError
from skyrl_async.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SENTINEL = "skyrl-async-sampled-text-7c1e9a04"
_TEXT_PARTS = ("text", "input_text", "output_text")


class ChatRenderer:
    """Renders conversations for one tokenizer. Stateless but for caches; safe to share between tasks."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """``tokenizer``: a Hugging Face fast tokenizer with a chat template; raises ``ConfigError`` without one."""
        if not tokenizer.chat_template:
            raise ConfigError(
                "policy.path must hold a tokenizer with a chat template, got one without; add chat_template.jinja to "
                "the directory or set chat_template in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self._speller = _Speller(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self._tokenizer)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Ids of the whole conversation; ``ValueError`` when the template refuses it."""
        return self._encode(self._render_text(normalise_messages(messages), add_generation_prompt))

    def render_tail(self, messages: Sequence[Message], *, last_completion_ended: bool) -> tuple[int, ...]:
        """Ids that follow the sampled tokens of the last assistant message: glue, later messages, generation prompt.

        ``last_completion_ended``: the sampled tokens end with the template's end of turn, which is then not repeated. A
        completion that was cut, or ended by a stop string, has none, and the tail begins with it.
        """
        tail = self._full_tail(messages)
        return tail[self._leading_end(tail) :] if last_completion_ended else tail

    def render_next(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[int, ...]:
        """The next prompt: ``token_ids`` (prompt and completion up to the last assistant message), then the tail.

        The end of turn is supplied unless ``token_ids`` ends with that very token.
        """
        tail = self._full_tail(messages)
        num_leading = self._leading_end(tail)
        ended = num_leading > 0 and bool(token_ids) and token_ids[-1] == tail[num_leading - 1]
        return (*token_ids, *(tail[num_leading:] if ended else tail))

    def stop_string(self, token_ids: Sequence[int], text: str, stop: Iterable[str]) -> str | None:
        """Which of ``stop`` ended a completion whose text was cut to ``text``, or None.

        vLLM's tokens keep the stop string that the text lacks.
        """
        stops = tuple(stop)
        if not stops:
            return None
        decoded = str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        if not decoded.startswith(text):
            return None
        return next((string for string in stops if decoded.startswith(string, len(text))), None)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in the text, a special token's name for such a token."""
        return self._speller.spell(token_id)

    def text_ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """(T,) UTF-8 bytes of decoded text up to and including each token; special tokens add none."""
        sizes = (0 if i in self._special_ids else len(self._speller.spell(i)) for i in token_ids)
        return tuple(accumulate(sizes))

    def _full_tail(self, messages: Sequence[Message]) -> tuple[int, ...]:
        normalised = normalise_messages(messages)
        last = max((i for i, message in enumerate(normalised) if message["role"] == "assistant"), default=None)
        if last is None:
            raise ValueError("messages must contain an assistant message to continue from, got none")
        normalised[last] = {"role": "assistant", "content": _SENTINEL}
        _, *after = self._render_text(normalised, True).split(_SENTINEL)
        if len(after) != 1:
            raise ConfigError(
                "the tokenizer's chat template must write an assistant's content exactly once, "
                f"got {len(after)} times; such a template cannot be continued in token space"
            )
        return self._encode(after[0])

    def _leading_end(self, tail: Sequence[int]) -> int:
        """How many ids at the start of a tail make the end of turn: white space, then one special token; 0 without."""
        for i, token_id in enumerate(tail):
            if token_id in self._special_ids:
                return i + 1
            if self._speller.spell(token_id).strip():
                break
        return 0

    def _render_text(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the tokenizer's chat template refuses these messages: {error}") from error
        return str(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class _Speller:
    """What each token of a vocabulary spells, in bytes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._spellings = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}

    def spell(self, token_id: int) -> bytes:
        spelling = self._spellings.get(token_id)
        if spelling is None:
            spelling = self._spellings[token_id] = self._look_up(token_id)
        return spelling

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return str(token).replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def normalise_messages(messages: Sequence[Message]) -> list[Message]:
    """Copies with ``content`` as a string (null and absent are empty, text parts are joined by line breaks).

    ``developer`` becomes ``system``, the only name templates know. ``ValueError`` names what cannot be used.
    """
    return [_normalise_message(i, message) for i, message in enumerate(messages)]


def _normalise_message(index: int, message: Message) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{index}].role must be a non-empty string, got {role!r}")
    content = _content_text(index, message.get("content"))
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _content_text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"messages[{index}].content must be a string, a list of parts or null, got {type(content).__name__}"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{index}].content may only hold text parts, got one of type {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)
