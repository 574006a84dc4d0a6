"""Prepares the constraints of an answer (bad words, grammar, thinking budget) with the help of
tokenizer workers."""

from pdserve.text.constraints import Constraints, check_structure, constraints_of, texts_of
from pdserve.text.request import RequestedSampling
from pdserve.text.workers.pool import LoadedTokenizer


async def prepare_constraints(
    requested: RequestedSampling, text: LoadedTokenizer, owner: bytes
) -> Constraints:
    """Tokenize the texts in a request's constraints and compile its grammar. Raises TextError,
    which names the request's field, if one is invalid; ServiceError UNAVAILABLE if no worker is
    available in time."""
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
