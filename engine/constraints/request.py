"""The constraints of a request's choices, from submit to its end.

They are a function of the params and of the generated ids, so a request that goes on elsewhere, or
again, makes them anew and gets the same tokens.
"""

import time
from collections.abc import Callable, Sequence

from pdserve.engine.api.errors import InvalidRequest, QueueFull
from pdserve.engine.api.request import Request, SamplingParams
from pdserve.engine.constraints.allowed_ids import AllowedIds
from pdserve.engine.constraints.bad_words import BadWords
from pdserve.engine.constraints.bitmask import Words
from pdserve.engine.constraints.choice import ChoiceConstraints, Constraint
from pdserve.engine.constraints.grammars.cache import GrammarCache
from pdserve.engine.constraints.grammars.compile_queue import Compilation
from pdserve.engine.constraints.grammars.compiled import CompiledGrammar, GrammarError
from pdserve.engine.constraints.grammars.follower import GrammarFollower
from pdserve.engine.constraints.grammars.mask_threads import MaskThreads
from pdserve.engine.constraints.thinking import ThinkingLimit

COMPILE_S = 15.0  # that a request waits for its grammar
MASK_WAIT_S = 0.01  # that a step waits for all masks


def constrains(params: SamplingParams) -> bool:
    """Whether they leave tokens out."""
    return bool(params.allowed_token_ids or params.bad_words or params.thinking or params.grammar)


class Constrainer:
    """Makes the constraints of an engine's requests; owns the threads that grammars need."""

    def __init__(
        self, vocab_size: int, eos_ids: frozenset[int], grammars: GrammarCache | None
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._grammars = grammars
        self._threads = MaskThreads()
        self.wake: Callable[[], None] = lambda: None  # from any thread: a request may go on

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for a grammar if there can be none, QueueFull if too many are to be
        compiled."""
        grammar = request.params.grammar
        if grammar is None or not request.generates:
            return
        if self._grammars is None:
            raise InvalidRequest("this engine has no tokenizer for grammars", "grammar")
        if not self._grammars.has_room(grammar.source, request.tenant):
            raise QueueFull("too many grammars wait to be compiled")

    def of_request(
        self, request: Request, generated: Sequence[list[int]], now_s: float
    ) -> "RequestConstraints":
        """`generated`: of each choice."""
        params, compiling = request.params, None
        if params.grammar is not None and self._grammars is not None:
            compiling = self._grammars.compile(params.grammar.source, request.tenant)
            compiling.add_done_callback(lambda _: self.wake())
        return RequestConstraints(self, params, generated, compiling, now_s + COMPILE_S)

    def of_choices(
        self,
        params: SamplingParams,
        generated: Sequence[list[int]],
        compiled: CompiledGrammar | None,
    ) -> list[ChoiceConstraints]:
        """Of each choice, with what it has generated."""
        allowed = None
        if params.allowed_token_ids:
            ends = self._eos_ids.union(params.stop_token_ids)
            allowed = AllowedIds(ends.union(params.allowed_token_ids), self._vocab_size)
        return [self._of_choice(params, ids, compiled, allowed) for ids in generated]

    def _of_choice(
        self,
        params: SamplingParams,
        generated: list[int],
        compiled: CompiledGrammar | None,
        allowed: AllowedIds | None,
    ) -> ChoiceConstraints:
        """`allowed` has no state, so that all choices have the same."""
        vocab_size = self._vocab_size
        plain: list[Constraint] = []
        if params.thinking is not None:
            plain.append(ThinkingLimit(params.thinking, vocab_size))
        if params.bad_words:
            plain.append(BadWords(params.bad_words, vocab_size))
        if allowed is not None:
            plain.append(allowed)
        for constraint in plain:
            for token in generated:
                constraint.push(token)
        follower = None
        if params.grammar is not None and compiled is not None:
            follower = GrammarFollower(
                params.grammar,
                compiled,
                generated,
                vocab_size,
                self._threads,
                on_late=lambda: self.wake(),
            )
        return ChoiceConstraints(plain, follower)

    def leave(self, compiling: Compilation) -> None:
        """A request has ended that waited for a grammar."""
        if self._grammars is not None:
            self._grammars.leave(compiling)

    def start_masks(self) -> None:
        """Begins to compute the masks of what was pushed since the last call."""
        self._threads.start()

    def load(self) -> None:
        """Makes ready for grammars, which takes seconds; otherwise the first of them does it."""
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
    """What the scheduler, the sampler and the progress of steps ask of one request."""

    def __init__(
        self,
        constrainer: Constrainer,
        params: SamplingParams,
        generated: Sequence[list[int]],
        compiling: Compilation | None,
        deadline_s: float,
    ) -> None:
        self._constrainer = constrainer
        self._params = params
        self._generated = generated
        self._compiling = compiling
        self._deadline_s = deadline_s
        self._choices: list[ChoiceConstraints] = []  # all of them, or none as yet
        self.begun = False  # what `has_begun` said last
        if compiling is None:
            self._begin(None)

    def leave(self) -> None:
        """The request has ended before it has begun: nothing is compiled for it any more."""
        if self._compiling is not None:
            self._constrainer.leave(self._compiling)

    def has_begun(self, now_s: float) -> bool:
        """Whether every choice is ready for its first token. Raises GrammarError."""
        if not self._choices and self._compiling is not None and self._compiling.done():
            error = self._compiling.exception()
            if isinstance(error, GrammarError):  # kept: raised again it would collect tracebacks
                raise GrammarError(str(error), error.is_internal)
            self._begin(self._compiling.result())
            self._constrainer.start_masks()
        if not self._choices and now_s > self._deadline_s:
            self.leave()
            raise GrammarError("the grammar takes too long to compile", is_internal=True)
        ready = (c.grammar is None or c.grammar.is_done for c in self._choices)
        self.begun = bool(self._choices) and all(ready)
        return self.begun

    def may_sample(self, choice: int) -> bool:
        """Whether its next token can be picked at the end of a step that begins now; once it has
        begun."""
        grammar = self._choices[choice].grammar
        return grammar is None or grammar.is_awaited

    def push(self, choice: int, token: int) -> bool:
        """A token was generated; whether nothing may follow it."""
        return self._choices[choice].push(token)

    def has_ended(self, choice: int) -> bool:
        """Whether nothing may follow what it had generated at its start; once `has_begun`."""
        grammar = self._choices[choice].grammar
        return grammar is not None and grammar.stopped

    def wait(self, choices: Sequence[int], until_s: float) -> bool:
        """Waits for the masks of choices, until a time of perf_counter; False if one lacks."""
        followers = [self._choices[choice].grammar for choice in choices]
        return all(f is None or f.wait(until_s) for f in followers)

    def mask(self, choice: int) -> Words | None:
        """The tokens that may come next, None: all. Raises GrammarError."""
        found = self._choices[choice]
        if found.grammar is not None and found.grammar.failure is not None:
            raise found.grammar.failure
        return found.mask()

    def param(self, choice: int) -> str:
        """The field to name when no token is left."""
        return self._choices[choice].param

    def _begin(self, compiled: CompiledGrammar | None) -> None:
        self._choices = self._constrainer.of_choices(self._params, self._generated, compiled)


def mask_deadline() -> float:
    """Until when a step waits for masks."""
    return time.perf_counter() + MASK_WAIT_S
