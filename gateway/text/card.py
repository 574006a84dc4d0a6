"""What gateway/text must know of a model beside its tokenizer.json; filled by the caller."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextCard:
    """From the proto ModelCard in a gateway, from CardData in process.

    vocab_size: rows of the model's embedding; may exceed what the tokenizer knows.
    eos_ids: any of them ends a text; the first is the template's `eos_token`.
    bos_id: the template's `bos_token`; None when the model has none.
    adds_bos: a prompt that no template made begins with bos_id.
    """

    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    adds_bos: bool = False
