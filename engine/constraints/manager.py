"""Constraints on the tokens of a request's choices: checks their parameters, makes them, and
releases them when the request ends.

Constraints are a function of the parameters and of the generated ids. So a request that resumes on
this worker or on another rebuilds them and gets the same tokens.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
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
    GrammarTimeout,
    MaskThreads,
    StepBudget,
)
from pdserve.engine.constraints.masks import AllowedIds, BadWords, Bitmask, ThinkingLimit


def check_constraints(params: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Check the parameters that constrain tokens. Raises InvalidRequest that names the parameter at
    fault."""
    for name in ("allowed_token_ids", "bad_words", "logprob_token_ids"):
        if len(getattr(params, name)) > MAX_ENTRIES[name]:
            raise InvalidRequest(f"{name} has more than {MAX_ENTRIES[name]} entries", name)
    for name, ids in _id_lists(params):
        if not all(0 <= token < vocab_size for token in ids):
            raise InvalidRequest(f"{name} has a token id outside the vocabulary", name)
    for name, ids in _sequences(params):
        if len(ids) > MAX_SEQUENCE_IDS:
            raise InvalidRequest(
                f"{name} has a sequence of {len(ids)} token ids; the maximum is {MAX_SEQUENCE_IDS}",
                name,
            )
    if not all(params.bad_words):
        raise InvalidRequest("bad_words must not contain an empty sequence", "bad_words")
    if params.logprob_token_ids and params.logprobs is None:
        raise InvalidRequest("logprob_token_ids requires logprobs", "logprob_token_ids")
    _check_thinking(params, eos_ids)
    _check_grammar(params)


def _check_thinking(params: SamplingParams, eos_ids: Collection[int]) -> None:
    budget = params.thinking
    if budget is None:
        return
    if budget.max_tokens < 0:
        raise InvalidRequest(
            f"the thinking budget must be at least 0 tokens, not {budget.max_tokens}", "thinking"
        )
    if not budget.end_ids:
        raise InvalidRequest(
            "a thinking budget requires end_ids, the token ids that end thinking", "thinking"
        )
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
    """Rule that says which tokens a choice may generate next, given the tokens generated so far."""

    @property
    def param(self) -> str:
        """Name of the request field that sets this constraint."""

    def accept_token(self, token: int) -> None:
        """Record a token that the choice has generated."""

    def bitmask(self) -> Bitmask | None:
        """Return the bitmask of the tokens that may come next; None allows all. Callers must not
        change the array."""


class ChoiceConstraints:
    """All constraints of one choice; a token is allowed if each of them allows it."""

    def __init__(self, plain: Sequence[Constraint], grammar: GrammarMatcher | None) -> None:
        self._all: Sequence[Constraint] = plain if grammar is None else (*plain, grammar)
        self.grammar = grammar

    @property
    def param(self) -> str:
        """Request field to blame if no token is allowed: the grammar if there is one, or else the
        last constraint's field."""
        return self._all[-1].param

    def accept_token(self, token: int) -> None:
        for constraint in self._all:
            constraint.accept_token(token)

    def bitmask(self) -> Bitmask | None:
        """Return the bitmask of the tokens that all constraints allow next; None allows all. The
        grammar's mask must be ready."""
        bitmasks = [constraint.bitmask() for constraint in self._all]
        masks = [bitmask for bitmask in bitmasks if bitmask is not None]
        if not masks:
            return None
        bitmask, *others = masks
        for other in others:
            bitmask = bitmask & other
        return bitmask


def has_constraints(params: SamplingParams) -> bool:
    """Whether these sampling parameters restrict which tokens may be generated."""
    return bool(params.allowed_token_ids or params.bad_words or params.thinking or params.grammar)


class ConstraintManager:
    """Makes the constraints of an engine's requests; owns the threads and the backend that grammars
    need."""

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
        """Check whether the request's grammar can be accepted now. Raises InvalidRequest if the
        engine does not support grammars, and QueueFull if too many grammars are waiting to be
        compiled."""
        grammar = request.params.grammar
        if grammar is None or not request.generates:
            return
        if self._grammars is None:
            raise InvalidRequest(
                "grammars are not supported: the engine has no tokenizer that suits them", "grammar"
            )
        if not self._grammars.has_room(grammar.source, request.tenant):
            raise QueueFull("too many grammars are waiting to be compiled; retry later")

    def of_request(
        self, request: Request, generated: Sequence[list[int]], now_s: float
    ) -> "RequestConstraints":
        """Make the constraints of a request and start to compile its grammar. `generated`: the ids
        that each choice has generated; `now_s`: current time."""
        grammar, compilation = request.params.grammar, None
        if grammar is not None and self._grammars is not None:
            compilation = self._grammars.compile(grammar.source, request.tenant)
            compilation.add_done_callback(lambda _: self.wake())
        return RequestConstraints(self, request, generated, compilation, now_s + COMPILE_S)

    def of_choices(
        self, request: Request, generated: Sequence[list[int]], compiled: CompiledGrammar | None
    ) -> list[ChoiceConstraints]:
        """Make the constraints of each choice, and record the choice's generated ids in them.
        `compiled`: the request's grammar, if it has one."""
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
        """Make the constraints of one choice. `allowed`: the constraint of allowed ids, an object
        that all choices can share because it has no state."""
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
        """End a request's use of its compiled grammar; called when the request ends."""
        if self._grammars is not None:
            self._grammars.release(compilation)

    def start_masks(self) -> None:
        """Let the mask threads compute the bitmasks of the tokens just accepted, and renew the time
        budget for the next step."""
        self._budget.renew()
        self._threads.start()

    def load(self) -> None:
        """Prepare the tokenizer for grammars, which takes seconds; without this call the first
        grammar has to wait for it."""
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
    """The constraints of one request, as the scheduler, the sampler and StepProgress use them."""

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
        """End the request's use of its compiled grammar; called when the request ends."""
        if self._compilation is not None:
            self._manager.release(self._compilation)

    def poll(self, now_s: float) -> bool:
        """Check whether the grammar is compiled and has accepted all generated tokens, and return
        whether the request can continue. Raises GrammarError if the grammar is wrong or takes too
        long to compile."""
        if not self._choices and self._compilation is not None and self._compilation.done():
            error = self._compilation.exception()
            if isinstance(error, GrammarError):  # raising the kept one would add tracebacks
                raise copy(error)
            self._make_choices(self._compilation.result())
            self._manager.start_masks()
        if not self._choices and now_s > self._deadline_s:
            raise GrammarTimeout(
                f"the grammar takes too long to compile: more than {COMPILE_S:g} s"
            )
        ready = (c.grammar is None or not c.grammar.is_behind for c in self._choices)
        self.is_ready = bool(self._choices) and all(ready)
        return self.is_ready

    def may_sample(self, choice: int) -> bool:
        """Whether a step that begins now can sample the next token of this choice: its token mask
        is ready or will be soon."""
        if not self.is_ready:
            return False
        grammar = self._choices[choice].grammar
        return grammar is None or grammar.is_awaited

    def accept_token(self, choice: int, token: int) -> None:
        """Record a token that this choice has generated."""
        constraints = self._choices[choice]
        constraints.accept_token(token)
        if constraints.grammar is not None and constraints.grammar.is_behind:
            self.is_ready = False

    def is_behind(self, choice: int) -> bool:
        """Whether the choice's grammar has not yet accepted all generated tokens, so that it is not
        known whether the choice is complete."""
        if not self._choices:
            return self._compilation is not None
        grammar = self._choices[choice].grammar
        return grammar is not None and grammar.is_behind

    def is_terminated(self, choice: int) -> bool:
        """Whether the choice's grammar allows no further token, so that the choice is complete. Not
        meaningful while `is_behind`."""
        grammar = self._choices[choice].grammar if self._choices else None
        return grammar is not None and grammar.is_terminated

    def wait(self, choices: Sequence[int], until_s: float) -> bool:
        """Wait until the masks of these choices are ready, but not beyond the perf_counter time
        `until_s`; return False if one of them is not ready."""
        matchers = [self._choices[choice].grammar for choice in choices]
        return all(m is None or m.wait(until_s) for m in matchers)

    def bitmask(self, choice: int) -> Bitmask | None:
        """Return the bitmask of the tokens that may come next in this choice; None allows all.
        Raises GrammarError if the choice's grammar has failed."""
        constraints = self._choices[choice]
        if constraints.grammar is not None and constraints.grammar.failure is not None:
            raise constraints.grammar.failure
        return constraints.bitmask()

    def param(self, choice: int) -> str:
        """Return the request field to blame if the constraints of this choice allow no token."""
        return self._choices[choice].param

    def _make_choices(self, compiled: CompiledGrammar | None) -> None:
        self._choices = self._manager.of_choices(self._request, self._generated, compiled)


def mask_deadline() -> float:
    """Return the time (perf_counter) until which a step that samples now may wait for masks."""
    return time.perf_counter() + MASK_WAIT_S
