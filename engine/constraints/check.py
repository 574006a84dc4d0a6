"""Checks the parameters that restrict tokens, before constraints are made from them. Pure."""

from collections.abc import Collection, Iterator

from pdserve.engine.api import (
    MAX_ENTRIES,
    MAX_GRAMMAR_BYTES,
    MAX_SEQUENCE_IDS,
    InvalidRequest,
    SamplingParams,
)


def check_constraints(params: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Raise InvalidRequest that names the parameter at fault."""
    for name in ("allowed_token_ids", "bad_words", "logprob_token_ids"):
        if len(getattr(params, name)) > MAX_ENTRIES[name]:
            raise InvalidRequest(f"{name} has more than {MAX_ENTRIES[name]} entries", name)
    for name, ids in _id_lists(params):
        if not all(0 <= token < vocab_size for token in ids):
            raise InvalidRequest(f"{name} has a token id outside the vocabulary", name)
    for name, ids in _sequences(params):
        if len(ids) > MAX_SEQUENCE_IDS:
            raise InvalidRequest(
                f"{name} has a sequence of more than {MAX_SEQUENCE_IDS} token ids", name
            )
    if not all(params.bad_words):
        raise InvalidRequest("bad_words has an empty sequence", "bad_words")
    if params.logprob_token_ids and params.logprobs is None:
        raise InvalidRequest("logprob_token_ids requires logprobs", "logprob_token_ids")
    _check_thinking(params, eos_ids)
    _check_grammar(params)


def _check_thinking(params: SamplingParams, eos_ids: Collection[int]) -> None:
    budget = params.thinking
    if budget is None:
        return
    if budget.max_tokens < 0:
        raise InvalidRequest("thinking must allow at least 0 tokens", "thinking")
    if not budget.end_ids:
        raise InvalidRequest("thinking requires the token ids that end it", "thinking")
    allowed = {*params.allowed_token_ids, *params.stop_token_ids, *eos_ids}
    if params.allowed_token_ids and not allowed.issuperset(budget.end_ids):
        raise InvalidRequest(
            "allowed_token_ids must include the tokens that end thinking", "allowed_token_ids"
        )


def _check_grammar(params: SamplingParams) -> None:
    grammar = params.grammar
    if grammar is None:
        return
    if not grammar.source:
        raise InvalidRequest("the grammar is empty", "grammar")
    if len(grammar.source.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes", "grammar")
    if params.min_tokens:
        raise InvalidRequest(
            "min_tokens cannot be used with a grammar, which defines where an answer may end",
            "min_tokens",
        )


def _id_lists(params: SamplingParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "allowed_token_ids", params.allowed_token_ids
    yield "logprob_token_ids", params.logprob_token_ids
    yield from _sequences(params)


def _sequences(params: SamplingParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    for word in params.bad_words:
        yield "bad_words", word
    if params.thinking is not None:
        yield "thinking", params.thinking.start_ids
        yield "thinking", params.thinking.end_ids
    if params.grammar is not None:
        yield "grammar", params.grammar.begins_after
