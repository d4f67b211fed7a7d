"""A byte-level BPE trained on the spot with a ChatML template, for tests that need chat but no model.

It merges the words of the template and a few others, so that the same text spelled one byte per token (``spelled``)
never is what the tokenizer would make of it.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import ChatRenderer, Tool
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.parsing.answers import AnswerParts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _train() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user assistant hello again hello again"] * 20, trainer)
    return bpe


_BPE = _train()


def make_tokenizer(
    template: str | None = CHATML,
    *,
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
    special_tokens: Sequence[str] = (),
    added_tokens: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """The tokenizer with another template, or none, and more tokens: ``added_tokens`` are text, ``special_tokens`` are not."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_BPE,
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        **({} if bos_token is None else {"bos_token": bos_token}),
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added_tokens])
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
END: int = TOKENIZER.eos_token_id
_ID_OF_BYTE = {RENDERER.token_bytes(i): i for i in range(len(TOKENIZER)) if len(RENDERER.token_bytes(i)) == 1}


def spelled(text: str) -> tuple[int, ...]:
    """``text`` one byte per token."""
    return tuple(_ID_OF_BYTE[bytes([byte])] for byte in text.encode())


def parsed(
    parser: AnswerParser, text: str, *, tools: Sequence[Tool] | None, starts_in_reasoning: bool = False
) -> AnswerParts:
    """The answer in a whole text."""
    stream = parser.stream(tools=tools, starts_in_reasoning=starts_in_reasoning)
    return stream.push(text) + stream.finish()
