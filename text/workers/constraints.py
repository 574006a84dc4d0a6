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
    prompt_constraints = constraints.of_prompt(prompt, vocabulary, continues=continues)
    params.bad_words.extend(TokenSequence(ids=ids) for ids in prompt_constraints.bad_words)
    if prompt_constraints.grammar:
        params.grammar.CopyFrom(
            Grammar(
                source=prompt_constraints.grammar, begins_after=prompt_constraints.grammar_after
            )
        )
    if prompt_constraints.thinking_budget is not None:
        budget = ThinkingBudget(
            max_tokens=prompt_constraints.thinking_budget,
            start_ids=prompt_constraints.thinking_start,
            end_ids=prompt_constraints.thinking_end,
        )
        params.thinking.CopyFrom(budget)
