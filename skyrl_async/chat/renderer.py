"""Chat messages as token ids, through a tokenizer's own chat template.

Sampled text is never tokenized again. The next prompt of a conversation is the token ids so far, followed by the *tail*: what the template
renders behind the last sampled message (contract 4 of the design). Does not know engines, environments or HTTP.
"""

import codecs
import ctypes
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from skyrl_async.chat.messages import Tool, normalise_messages, with_short_ids, with_text_arguments
from skyrl_async.chat.spelling import Speller
from skyrl_async.columns import TokenIds, column
from skyrl_async.errors import ConfigError, PromptTooLongError
from skyrl_async.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LONG_TEXT = 16_384
"""Characters. A shorter text is tokenized within milliseconds, so an overflow is reported with the exact length."""
_HUGE_TEXT = 2**19
_LIBC = ctypes.CDLL(None)
_SENTINEL = f"skyrl-async-sampled-text-{token_hex(8)}"


class ChatRenderer:
    """Renders conversations for one tokenizer. Has no state except caches; tasks and threads may share it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """``tokenizer``: a Hugging Face fast tokenizer. Raises ``ConfigError`` if it has no chat template."""
        if not tokenizer.chat_template:
            raise ConfigError(
                "policy.path must hold a tokenizer with a chat template, got one without; add chat_template.jinja to "
                "the directory or set chat_template in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        """The tokenizer, whose template is rendered."""
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        """Ids of the tokens that are no text of a message, such as the end of a turn."""
        self._speller = Speller(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is below it."""
        return len(self.tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        limit: int | None = None,
    ) -> TokenIds:
        """(T,) int32 token ids of the whole conversation. ``limit``: as for ``encode``.

        Raises ``ValueError`` if the template refuses the messages.
        """
        return self.encode(self._render_text(normalise_messages(messages), tools, add_generation_prompt), limit=limit)

    def render_next(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int] | TokenIds,
        *,
        num_covered: int | None = None,
        tools: Sequence[Tool] | None = None,
        limit: int | None = None,
    ) -> TokenIds:
        """(T,) int32 token ids of the next prompt: ``token_ids`` unchanged, then the tail.

        The token that ends the turn is added unless ``token_ids`` ends with it. Tokens of a stop string stay, although the text lacks the
        stop string: they were sampled.

        Args:
            token_ids: prompt and completion of ``messages[:num_covered]``.
            num_covered: number of messages that ``token_ids`` spells; the last of them is an assistant message. Messages after it may
                include assistant messages that were not sampled. None: all messages through the last assistant message.
            limit: as for ``encode``, for the whole prompt.

        Raises:
            ValueError: the template refuses the messages, or ``num_covered`` does not end in an assistant message.
            ConfigError: the template does not allow to continue the ids.
        """
        tail = self.encode(self._full_tail(messages, num_covered, tools), limit=limit, num_before=len(token_ids))
        num_leading = self._leading_end(tail)
        ended = num_leading > 0 and len(token_ids) > 0 and token_ids[-1] == tail[num_leading - 1]
        return column(np.concatenate([column(token_ids, np.int32), tail[num_leading:] if ended else tail]), np.int32)

    def stop_string(self, token_ids: Sequence[int] | TokenIds, text: str, stop: Iterable[str]) -> str | None:
        """The stop string that ended a completion, or None.

        The text that vLLM returns lacks the stop string, but the tokens spell it.

        Args:
            token_ids: the completion's tokens.
            text: the completion's text, cut before the stop string.
            stop: the request's stop strings.
        """
        stops = tuple(stop)
        if not stops:
            return None
        for skips_special in (True, False):
            decoded = self.decode(token_ids, skip_special_tokens=skips_special)
            if text.startswith(" ") and not decoded.startswith(" "):
                decoded = f" {decoded}"  # Llama 2's tokenizer drops a first space that vLLM, which decodes after a prompt, keeps
            if decoded.startswith(text):
                spelled = (string for string in stops if decoded.startswith(string, len(text)))
                return min(spelled, key=len, default=None)  # the first to be complete, as in vLLM
        return None

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``, with U+FFFD for bytes that are no characters."""
        ids = column(token_ids, np.int32).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in a text. A special token has the bytes of its name."""
        return self._speller.spell(token_id)

    def text_ends(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = True) -> NDArray[np.int32]:
        """(T,) int32: for each token, the number of bytes of decoded text through that token. Special tokens that are skipped add none."""
        found, places = np.unique(column(token_ids, np.int32), return_inverse=True)
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        known = [b"" if i in skipped else self._speller.spell(i) for i in found.tolist()]
        spelled = [known[place] for place in places.tolist()]
        try:
            b"".join(spelled).decode()
        except UnicodeDecodeError:  # U+FFFD stands in the text for bytes that are no characters
            return _decoded_ends(spelled)
        return column(column(list(map(len, known)), np.int32)[places].cumsum(dtype=np.int32), np.int32)

    def _full_tail(self, messages: Sequence[Message], num_covered: int | None, tools: Sequence[Tool] | None) -> str:
        normalised = normalise_messages(messages)
        last = _last_covered(normalised, num_covered)
        spoken = [*normalised[:last], {"role": "assistant", "content": _SENTINEL}, *normalised[last + 1 :]]
        try:
            text = self._render_text(spoken, tools, True)
        except ValueError:
            if "tool_calls" not in normalised[last]:
                raise
            return self._tail_after_calls(normalised, last, tools)
        return _after_sentinel(text)

    def _tail_after_calls(self, messages: list[Message], last: int, tools: Sequence[Tool] | None) -> str:
        """The tail for a template that demands tool calls before tool results.

        The sentinel is the argument of a call. The tail begins where the turn ends behind that call.
        """
        *calls, call = messages[last]["tool_calls"]
        calls.append({**call, "function": {**call["function"], "arguments": {"text": _SENTINEL}}})
        called = [*messages[:last], {"role": "assistant", "content": "", "tool_calls": calls}, *messages[last + 1 :]]
        after = _after_sentinel(self._render_text(called, tools, True))
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        end = _after_sentinel(self._render_text(exchange, None, False)).strip()
        start = after.find(end) if end else -1
        if start < 0 or not self.special_ids.isdisjoint(self.encode(after[:start]).tolist()):
            raise ConfigError(
                "the tokenizer's chat template must end a turn of tool calls as it ends a turn of words, with "
                f"{end!r}, which does not follow them; such a template cannot be continued in token space"
            )
        return after[start:]

    def _leading_end(self, tail: TokenIds) -> int:
        """Number of ids at the start of a tail that end the turn: white space, then one special token. 0 if the tail does not begin so."""
        for i, token_id in enumerate(map(int, tail)):
            if token_id in self.special_ids:
                return i + 1
            if self._speller.spell(token_id).strip():
                break
        return 0

    def _render_text(self, messages: list[Message], tools: Sequence[Tool] | None, add_generation_prompt: bool) -> str:
        try:
            return self._apply_template(messages, tools, add_generation_prompt)
        except ValueError:
            if not any(key in message for message in messages for key in ("tool_calls", "tool_call_id")):
                raise
            for adapt in (with_text_arguments, with_short_ids):
                try:
                    return self._apply_template(adapt(messages), tools, add_generation_prompt)
                except ValueError:
                    continue
            raise

    def _apply_template(
        self, messages: list[Message], tools: Sequence[Tool] | None, add_generation_prompt: bool
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the tokenizer's chat template refuses these messages: {error}") from error

    def encode(self, text: str, *, limit: int | None = None, num_before: int = 0) -> TokenIds:
        """(T,) int32 token ids of ``text``, without adding special tokens. Lets other threads run meanwhile.

        Raises ``PromptTooLongError`` without tokenizing if the text is long and is known to reach ``limit`` tokens, counted with the
        ``num_before`` tokens in front of it.
        """
        if limit is not None and len(text) > _LONG_TEXT:
            fewest = num_before + self._speller.fewest_tokens(text)
            if fewest >= limit:
                raise PromptTooLongError(fewest, limit, num_characters=len(text))
        ids = column(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)
        if len(text) > _HUGE_TEXT and hasattr(_LIBC, "malloc_trim"):
            # The tokenizer took a hundred bytes per token in small blocks, which glibc would not return.
            _LIBC.malloc_trim(0)
        return ids


def _decoded_ends(spelled: Sequence[bytes]) -> NDArray[np.int32]:
    """``text_ends`` of tokens with these bytes, counted in the text that is decoded from them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sizes = [len(decoder.decode(piece).encode()) for piece in spelled]
    sizes[-1] += len(decoder.decode(b"", True).encode())
    return column(np.cumsum(sizes, dtype=np.int32), np.int32)


def _last_covered(messages: Sequence[Message], num_covered: int | None) -> int:
    """Index of the last covered message, an assistant message."""
    if num_covered is not None:
        if not 1 <= num_covered <= len(messages) or messages[num_covered - 1]["role"] != "assistant":
            raise ValueError(
                f"num_covered must end in an assistant message, got {num_covered} of {len(messages)} messages"
            )
        return num_covered - 1
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise ValueError("messages must contain an assistant message to continue from, got none")
    return last


def _after_sentinel(text: str) -> str:
    _, *after = text.split(_SENTINEL)
    if len(after) != 1:
        raise ConfigError(
            "the tokenizer's chat template must write an assistant's content exactly once, "
            f"got {len(after)} times; such a template cannot be continued in token space"
        )
    return after[0]
