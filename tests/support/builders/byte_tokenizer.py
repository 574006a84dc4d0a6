"""A tokenizer of bytes for models with random weights: each byte is a token."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS, TURN, EOS = "<|begin|>", "<|im_start|>", "<|im_end|>"  # ids 256, 257, 258
VOCAB_SIZE = 259  # 256 bytes and the three above
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE without merges: token id = rank of the byte, then the three specials.

    Ids from 259 to `vocab_size` have no text, as in the padded vocabularies of real models.
    """
    if vocab_size < VOCAB_SIZE:
        raise ValueError(f"the byte tokenizer needs {VOCAB_SIZE} ids, not {vocab_size}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, TURN, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 256)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
