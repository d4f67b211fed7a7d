"""The bytes that each token of a vocabulary spells: those of all tokens, joined, are the text's UTF-8.

Does not know messages or templates.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_SLICE = 2**20


class Speller:
    """Spells the tokens of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._spellings = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
        self._shares = self._shares_of_bytes() if _keeps_characters(tokenizer) else None

    def spell(self, token_id: int) -> bytes:
        """The bytes of one token. A special token has the bytes of its name; an unknown id has none."""
        spelling = self._spellings.get(token_id)
        if spelling is None:
            spelling = self._spellings[token_id] = self._look_up(token_id)
        return spelling

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens in ``text``, found without tokenizing it. 0 where nothing is known.

        A byte counts as 1/n, where n is the length of the longest token with such a byte: the bytes of a token add up to 1 at most.
        Normalization (NFC) joins at most four characters into one, and joins at most one ASCII character to each other one.
        """
        if self._shares is None:
            return 0
        ascii_bytes = text.encode("ascii", "ignore")
        counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(256, dtype=np.int64)
        for start in range(0, len(ascii_bytes), _SLICE):  # in slices, so that other threads run in between
            piece = np.frombuffer(ascii_bytes, dtype=np.uint8, count=-1, offset=start)[:_SLICE]
            counts += np.bincount(piece, minlength=256)
        num_others = len(text) - len(ascii_bytes)
        by_ascii = float(counts @ self._shares) - num_others * float(self._shares.max())
        return int(max(by_ascii, len(text) / 4 * float(self._shares.min())) * (1 - 1e-9))

    def _shares_of_bytes(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """(256,) For each byte, 1/n, where n is the length of the longest token with such a byte."""
        longest = np.ones(256)
        for token_id in range(len(self._tokenizer)):
            spelling = self.spell(token_id)
            for byte in set(spelling):
                longest[byte] = max(longest[byte], len(spelling))
        return 1 / longest

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return str(token).replace("\u2581", " ").encode()


def _keeps_characters(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Whether tokens spell every character of a text: none is dropped, unknown, or stripped around a special token."""
    backend, vocabulary = tokenizer.backend_tokenizer, tokenizer.get_vocab()
    parts = [json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part]
    kinds = {kind for part in parts for kind in _kinds(part)}
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()) or not kinds <= _KEEPING:
        return False
    if type(backend.model).__name__ != "BPE":
        return False
    if backend.model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return "ByteLevel" in kinds and vocabulary.keys() >= _BYTE_OF_CHAR.keys()


_KEEPING = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace of one character", "Split"}


def _kinds(part: dict[str, Any]) -> Iterator[str]:
    """The steps of a normalizer or pre-tokenizer."""
    match part:
        case {"normalizers": list(steps)} | {"pretokenizers": list(steps)}:
            for step in steps:
                yield from _kinds(step)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1 and new:
            yield "Replace of one character"
        case {"type": "Split", "behavior": "Removed"}:
            yield "Split that removes"
        case {"type": str(kind)}:
            yield kind


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level BPE writes bytes: printable ones as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
