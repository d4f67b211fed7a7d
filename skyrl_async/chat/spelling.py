"""What each token of a vocabulary spells.

Flows in: a tokenizer and token ids. Flows out: bytes; joined they are the text's UTF-8. Does not know messages or templates.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Speller:
    """What each token of a vocabulary spells, in bytes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._spellings = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}

    def spell(self, token_id: int) -> bytes:
        """The bytes of one token, a special token's name for such a token; none for an unknown id."""
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
