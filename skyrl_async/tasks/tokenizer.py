"""A tokenizer trained on the spot: byte-level BPE of a few hundred entries, every digit its own token, ChatML.

Flows in: texts. Flows out: a transformers tokenizer, and conversations as token ids with the mask of what the assistant
said. This module does not know tasks or models.
"""

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_async.types import Message

START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
MAX_VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ROLES = ("system", "user", "assistant", "tool")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for ``texts``; the same texts give the same tokenizer.

    Digits and newlines are tokens of their own, so that no token reaches across a turn's edge: the tokens of a
    conversation are those of its pieces.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in (PAD_TOKEN, START_TOKEN, END_TOKEN)]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        min_frequency=2,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    role_texts = [role for role in _ROLES for _ in range(2)]
    backend.train_from_iterator([*role_texts, *texts], trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode_conversation(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return the token ids that the chat template gives ``messages``, and 1 for each that the assistant has to say.

    The assistant says its content and ``<|im_end|>``.
    """
    token_ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        is_said = int(message["role"] == "assistant")
        pieces = (
            (f"{START_TOKEN}{message['role']}\n", 0),
            (f"{message['content']}{END_TOKEN}", is_said),
            ("\n", 0),
        )
        for text, in_loss in pieces:
            piece_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            token_ids += piece_ids
            mask += [in_loss] * len(piece_ids)
    return token_ids, mask
