"""Prepares an answer's constraints (bad words, grammar, thinking budget) in tokenizer workers."""

from pdserve.text.constraints import Constraints, check_structure, constraints_of, texts_of
from pdserve.text.request import RequestedSampling
from pdserve.text.workers.pool import LoadedTokenizer


async def prepare_constraints(
    requested: RequestedSampling, text: LoadedTokenizer, owner: bytes
) -> Constraints:
    """Tokenize the texts and compile the grammar of a request's constraints. Raises TextError that
    names the field; ServiceError UNAVAILABLE."""
    structure = requested.structure
    if structure is not None:
        check_structure(requested, structure)
    texts = texts_of(requested)
    sequences = await text.workers.sequences(owner, texts) if texts else []
    ids = dict(zip(texts, sequences, strict=True))
    # Check the rest first: compiling the grammar takes longest.
    constraints_of(requested, ids, "", text.vocabulary)
    grammar = "" if structure is None else await text.workers.grammar(owner, structure)
    return constraints_of(requested, ids, grammar, text.vocabulary)
