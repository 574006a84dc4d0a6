"""Prepares an answer's constraints (bad words, grammar, thinking budget) in tokenizer workers."""

from collections.abc import Sequence

from pdserve.protos.common_pb2 import Grammar, SamplingParams, ThinkingBudget, TokenSequence
from pdserve.text.constraints import Constraints, check_structure, constraints_of, texts_of
from pdserve.text.request import RequestedSampling
from pdserve.text.tokenizer import Vocabulary
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


def apply_constraints(
    constraints: Constraints,
    params: SamplingParams,
    prompt: Sequence[int],
    vocabulary: Vocabulary,
    *,
    continues: bool,
) -> None:
    """Add the constraints to the sampling params of one prompt."""
    bound = constraints.of_prompt(prompt, vocabulary, continues=continues)
    params.bad_words.extend(TokenSequence(ids=ids) for ids in bound.bad_words)
    if bound.grammar:
        params.grammar.CopyFrom(Grammar(source=bound.grammar, begins_after=bound.grammar_after))
    if bound.thinking_budget is not None:
        budget = ThinkingBudget(
            max_tokens=bound.thinking_budget,
            start_ids=bound.thinking_start,
            end_ids=bound.thinking_end,
        )
        params.thinking.CopyFrom(budget)
