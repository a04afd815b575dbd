"""A byte-level BPE tokenizer with a chat template, for targets trained from scratch.

Knows the special tokens and the template. Does not know how rows are cut or masked.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from draftsmith.data.documents import TRAIN
from draftsmith.errors import UserError
from draftsmith.files import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from draftsmith.data.documents import Documents

END_OF_TEXT, PAD, USER, ASSISTANT, SYSTEM, END = SPECIALS = (
    "<|endoftext|>",
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
# Answer and end-of-turn token stand inside `generation`: `transformers` itself says which tokens are the assistant's.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% elif message['role'] in ['user', 'system'] %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTES = 256


def train_tokenizer(documents: "Documents", size: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of `size` entries trained on the train split of `documents` (see `load_documents`).

    <|endoftext|> is both beginning and end of a text, and is put before every text; <|end|> ends a turn.
    Raises `UserError` when `size` cannot hold the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if size < BYTES + len(SPECIALS):
        raise UserError(f"tokenizer size {size}: byte-level BPE needs at least {BYTES + len(SPECIALS)} entries")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    first = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[first])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, END],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tokenizer_digest(tokenizer: Any) -> str:
    """Sixteen hex digits naming vocabulary, special tokens and chat template: equal digests give equal rows."""
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "template": tokenizer.chat_template}
    return digest([tokenizer.get_vocab(), special, tokenizer.is_fast and _backend(tokenizer)])


def _backend(tokenizer: Any) -> str:
    """The rules of a fast tokenizer without padding and truncation, which callers switch and which change no row."""
    import json

    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(
        {key: rules[key] for key in ("normalizer", "pre_tokenizer", "post_processor", "model") if key in rules}
    )


def _texts(documents: "Documents") -> Iterator[str]:
    for index in map(int, documents.indices(TRAIN)):
        document = documents[index]
        if document.text is not None:
            yield document.text
        for message in document.messages or ():
            yield message["content"] or ""
