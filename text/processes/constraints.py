"""Prepares an answer's constraints (bad words, grammar, thinking budget) in the text processes."""

from pdserve.text.constraints import Constraints, check_structure, constraints_of, texts_of
from pdserve.text.processes.pool import LoadedText
from pdserve.text.request import RequestedSampling


async def prepared(requested: RequestedSampling, text: LoadedText, owner: bytes) -> Constraints:
    """Tokenize the texts and compile the grammar of a request's constraints. Raises TextError that
    names the field; ServiceError UNAVAILABLE."""
    structure = requested.structure
    if structure is not None:
        check_structure(requested, structure)
    texts = texts_of(requested)
    sequences = await text.processes.sequences(owner, texts) if texts else []
    ids = dict(zip(texts, sequences, strict=True))
    # Check the rest first: compiling the grammar takes longest.
    constraints_of(requested, ids, "", text.vocabulary)
    grammar = "" if structure is None else await text.processes.grammar(owner, structure)
    return constraints_of(requested, ids, grammar, text.vocabulary)
