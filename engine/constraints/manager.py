"""The constraints of a request's choices, from the check of its parameters to its end.

They are a function of the params and of the generated ids, so a request that resumes here or on
another worker rebuilds them and gets the same tokens.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from pdserve.engine.api import (
    MAX_ENTRIES,
    MAX_GRAMMAR_BYTES,
    MAX_SEQUENCE_IDS,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
)
from pdserve.engine.constraints.grammars import (
    Compilation,
    CompiledGrammar,
    GrammarBackend,
    GrammarError,
    GrammarMatcher,
    MaskThreads,
    StepBudget,
)
from pdserve.engine.constraints.masks import AllowedIds, BadWords, Bitmask, ThinkingLimit


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


COMPILE_S = 15.0  # maximum wait of a request for its grammar
MASK_WAIT_S = 0.01  # maximum wait of a step for all masks


class Constraint(Protocol):
    """Rule for which tokens may come next, as a function of the ids accepted so far."""

    @property
    def param(self) -> str:
        """The request field of the constraint."""

    def accept_token(self, token: int) -> None:
        """Record a generated token."""

    def bitmask(self) -> Bitmask | None:
        """Return the tokens that may come next; None: all. Callers must not change the array."""


class ChoiceConstraints:
    """The constraints of one choice; each of them must allow a token."""

    def __init__(self, plain: Sequence[Constraint], grammar: GrammarMatcher | None) -> None:
        self._all: Sequence[Constraint] = plain if grammar is None else (*plain, grammar)
        self.grammar = grammar

    @property
    def param(self) -> str:
        """Field to name when no token is allowed: the grammar, or else the last constraint."""
        return self._all[-1].param

    def accept_token(self, token: int) -> None:
        for constraint in self._all:
            constraint.accept_token(token)

    def bitmask(self) -> Bitmask | None:
        """Return the tokens that may come next; None: all. The grammar's mask must be ready."""
        bitmasks = [constraint.bitmask() for constraint in self._all]
        masks = [bitmask for bitmask in bitmasks if bitmask is not None]
        if not masks:
            return None
        bitmask, *others = masks
        for other in others:
            bitmask = bitmask & other
        return bitmask


def has_constraints(params: SamplingParams) -> bool:
    """Whether the params restrict tokens."""
    return bool(params.allowed_token_ids or params.bad_words or params.thinking or params.grammar)


class ConstraintManager:
    """Factory of the constraints of an engine's requests; owns the threads that grammars need."""

    def __init__(
        self, vocab_size: int, eos_ids: frozenset[int], grammars: GrammarBackend | None
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._grammars = grammars
        self._threads = MaskThreads()
        self._budget = StepBudget()
        self.wake: Callable[[], None] = lambda: None  # any thread: a request may continue

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if grammars are not supported, QueueFull if too many wait."""
        grammar = request.params.grammar
        if grammar is None or not request.generates:
            return
        if self._grammars is None:
            raise InvalidRequest("this engine has no tokenizer for grammars", "grammar")
        if not self._grammars.has_room(grammar.source, request.tenant):
            raise QueueFull("too many grammars are waiting to be compiled")

    def of_request(
        self, request: Request, generated: Sequence[list[int]], now_s: float
    ) -> "RequestConstraints":
        """Make a request's constraints; `generated`: the ids of each choice."""
        grammar, compilation = request.params.grammar, None
        if grammar is not None and self._grammars is not None:
            compilation = self._grammars.compile(grammar.source, request.tenant)
            compilation.add_done_callback(lambda _: self.wake())
        return RequestConstraints(self, request, generated, compilation, now_s + COMPILE_S)

    def of_choices(
        self, request: Request, generated: Sequence[list[int]], compiled: CompiledGrammar | None
    ) -> list[ChoiceConstraints]:
        """Make the constraints of each choice, advanced by its generated ids."""
        params, allowed = request.params, None
        if params.allowed_token_ids:
            ends = self._eos_ids.union(params.stop_token_ids)
            allowed = AllowedIds(ends.union(params.allowed_token_ids), self._vocab_size)
        return [self._of_choice(request, ids, compiled, allowed) for ids in generated]

    def _of_choice(
        self,
        request: Request,
        generated: list[int],
        compiled: CompiledGrammar | None,
        allowed: AllowedIds | None,
    ) -> ChoiceConstraints:
        """Make the constraint of one choice; `allowed` has no state, so all choices share it."""
        params, vocab_size = request.params, self._vocab_size
        plain: list[Constraint] = []
        if params.thinking is not None:
            plain.append(ThinkingLimit(params.thinking, vocab_size))
        if params.bad_words:
            plain.append(BadWords(params.bad_words, vocab_size))
        if allowed is not None:
            plain.append(allowed)
        for constraint in plain:
            for token in generated:
                constraint.accept_token(token)
        matcher = None
        if params.grammar is not None and compiled is not None:
            matcher = GrammarMatcher(
                params.grammar,
                compiled,
                generated,
                vocab_size,
                request.tenant,
                self._threads,
                self._budget,
                on_late=lambda: self.wake(),
            )
        return ChoiceConstraints(plain, matcher)

    def release(self, compilation: Compilation) -> None:
        """Release a compilation when a request with a grammar ends."""
        if self._grammars is not None:
            self._grammars.release(compilation)

    def start_masks(self) -> None:
        """Start computing masks for the newly accepted tokens, and renew the step budget."""
        self._budget.renew()
        self._threads.start()

    def load(self) -> None:
        """Prepare for grammars, which takes seconds; otherwise the first grammar pays that time."""
        if self._grammars is not None:
            try:
                self._grammars.load()
            except GrammarError:
                self._grammars.close()
                self._grammars = None

    def close(self) -> None:
        self._threads.close()
        if self._grammars is not None:
            self._grammars.close()


class RequestConstraints:
    """The constraints of one request, as scheduler, sampler and step progress use them."""

    def __init__(
        self,
        manager: ConstraintManager,
        request: Request,
        generated: Sequence[list[int]],
        compilation: Compilation | None,
        deadline_s: float,
    ) -> None:
        self._manager = manager
        self._request = request
        self._generated = generated
        self._compilation = compilation
        self._deadline_s = deadline_s
        self._choices: list[ChoiceConstraints] = []  # all of them, or empty until compiled
        # Whether every choice may continue: only after its grammar is compiled and has accepted its
        # ids, because these may be complete. `poll` sets it.
        self.is_ready = False
        if compilation is None:
            self._make_choices(None)

    def release(self) -> None:
        """Release the compilation when the request ends."""
        if self._compilation is not None:
            self._manager.release(self._compilation)

    def poll(self, now_s: float) -> bool:
        """Return whether the constraints are ready by now. Raises GrammarError."""
        if not self._choices and self._compilation is not None and self._compilation.done():
            error = self._compilation.exception()
            if isinstance(error, GrammarError):  # raising the kept one would add tracebacks
                raise GrammarError(str(error), error.is_internal)
            self._make_choices(self._compilation.result())
            self._manager.start_masks()
        if not self._choices and now_s > self._deadline_s:
            raise GrammarError("the grammar takes too long to compile", is_internal=True)
        ready = (c.grammar is None or not c.grammar.is_behind for c in self._choices)
        self.is_ready = bool(self._choices) and all(ready)
        return self.is_ready

    def may_sample(self, choice: int) -> bool:
        """Whether the choice's next token can be sampled in a step that begins now."""
        if not self.is_ready:
            return False
        grammar = self._choices[choice].grammar
        return grammar is None or grammar.is_awaited

    def accept_token(self, choice: int, token: int) -> None:
        """Record a generated token."""
        constraints = self._choices[choice]
        constraints.accept_token(token)
        if constraints.grammar is not None and constraints.grammar.is_behind:
            self.is_ready = False

    def is_behind(self, choice: int) -> bool:
        """Whether it is not known yet if a token may follow."""
        if not self._choices:
            return self._compilation is not None
        grammar = self._choices[choice].grammar
        return grammar is not None and grammar.is_behind

    def is_terminated(self, choice: int) -> bool:
        """Whether no token may follow, unless `is_behind`."""
        grammar = self._choices[choice].grammar if self._choices else None
        return grammar is not None and grammar.is_terminated

    def wait(self, choices: Sequence[int], until_s: float) -> bool:
        """Wait for choices' masks until a perf_counter time; return False if one is missing."""
        matchers = [self._choices[choice].grammar for choice in choices]
        return all(m is None or m.wait(until_s) for m in matchers)

    def bitmask(self, choice: int) -> Bitmask | None:
        """Return the tokens that may come next; None: all. Raises GrammarError."""
        constraints = self._choices[choice]
        if constraints.grammar is not None and constraints.grammar.failure is not None:
            raise constraints.grammar.failure
        return constraints.bitmask()

    def param(self, choice: int) -> str:
        """Return the request field to name when no token is allowed."""
        return self._choices[choice].param

    def _make_choices(self, compiled: CompiledGrammar | None) -> None:
        self._choices = self._manager.of_choices(self._request, self._generated, compiled)


def mask_deadline() -> float:
    """Return the perf_counter time until which a step waits for masks."""
    return time.perf_counter() + MASK_WAIT_S
