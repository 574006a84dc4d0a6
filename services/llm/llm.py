"""`pdserve.LLM`: the engine and the text layer in this process, without servers.

The LLM owns its engine thread; `close` (or the end of a `with` block, or of the main thread) ends
it. Methods may be called from several threads; their requests share the batch.
"""

import itertools
import json
import math
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from types import TracebackType
from typing import Any

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.api.request import (
    Event,
    Finished,
    Pooled,
    Request,
    RequestFailed,
    SamplingParams,
    Step,
)
from pdserve.engine.build import build_engine
from pdserve.engine.thread import EngineThread
from pdserve.gateway.text.generation import GenerationDefaults
from pdserve.gateway.text.messages import TemplateInput
from pdserve.gateway.text.templates.chat_template import ChatTemplate
from pdserve.gateway.text.tokenizer import Tokenizer
from pdserve.gateway.text.vocabulary import TextCard
from pdserve.services.llm.generation import Generation, GenerationError, Result, TextDelta
from pdserve.services.options.options import options_of

POOLS = SamplingParams()  # of a request that generates nothing
EXIT_POLL_S = 0.5  # so late an unclosed LLM notices that the main thread has ended
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model to generate with.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "Hello!"}]).text)
    """

    def __init__(self, model: str = "", *, threads: int = 0, **options: Any) -> None:
        """`model` as for `pdserve up --model`; `options` are the fields of EngineConfig
        (`weights="bf16"`, `kv_tokens=8192`, ...); `threads` 0 takes all cores.

        Raises TypeError for an unknown option, OptionError for a bad value, CheckpointError.
        """
        config = EngineConfig(model=model, threads=threads, **options)
        for option in options_of(EngineConfig):
            option.accept(getattr(config, option.field), "LLM")
        engine, self.card = build_engine(config)
        text_card = TextCard(
            self.card.vocab_size, self.card.eos_ids, self.card.bos_id, self.card.adds_bos
        )
        self.tokenizer = Tokenizer(self.card.tokenizer_json, text_card)
        self._template = ChatTemplate(self.card.chat_template, self.tokenizer)
        self.defaults = self._default_params()
        self._most = config.max_waiting
        self._keys = itertools.count()
        self._inboxes: dict[str, queue.SimpleQueue[Event]] = {}
        self._closed = threading.Event()
        self._thread = EngineThread(engine, self._on_step)
        self._thread.start()
        # Python waits for the engine thread before it ends; nobody may have called close.
        threading.Thread(target=self._close_at_exit, daemon=True, name="llm-exit").start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Result]:
        """Continue each prompt (a text, or token ids); results are in order.

        `params` None takes the model's defaults (`self.defaults`); a `seed` makes sampling
        repeatable. Raises TextError, InvalidRequest, ContextLengthExceeded, GenerationError.
        """
        submitted: deque[_SubmittedRequest] = deque()
        results: list[Result] = []
        try:
            for prompt in _as_list(prompts):
                if len(submitted) == self._most:
                    results.append(submitted.popleft().result())
                submitted.append(self._begin(self._encode(prompt), params, stop, seed, True))
            while submitted:
                results.append(submitted.popleft().result())
            return results
        finally:
            for other in submitted:  # after an error nobody waits for the others
                other.close()

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Result:
        """The answer to a conversation of {"role", "content"} messages. Raises as `generate`."""
        return self._begin(self._render(messages), params, stop, seed, False).result()

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Iterator[TextDelta]:
        """The text of a prompt's continuation, or of the answer to messages, as it comes.

        Closing the iterator aborts the request. Raises as `generate`, at the first step.
        """
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self._render(prompt) if is_chat else self._encode(prompt)  # type: ignore[arg-type]
        with closing(self._begin(ids, params, stop, seed, not is_chat)) as submitted:
            yield from submitted.deltas()

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """The embedding of each prompt (a text, or token ids), in order, of length 1 if the model
        normalizes. Raises as `generate`; InvalidRequest from a model that generates."""
        inboxes: deque[tuple[str, queue.SimpleQueue[Event]]] = deque()
        found: list[list[float]] = []
        try:
            for prompt in _as_list(prompts):
                if len(inboxes) == self._most:
                    found.append(self._embedding(*inboxes.popleft()))
                request = Request(self._new_key(), tuple(self._encode(prompt)), POOLS, 0, pool=True)
                inboxes.append((request.key, self._submit(request)))
            while inboxes:
                found.append(self._embedding(*inboxes.popleft()))
            return found
        finally:
            for key, _ in inboxes:
                self._abort(key, ())

    def close(self) -> None:
        """End the engine; what still runs is given up. May be called again."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.close()
            for key, inbox in list(self._inboxes.items()):
                inbox.put(RequestFailed(key, "the LLM was closed"))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _close_at_exit(self) -> None:
        while not self._closed.wait(EXIT_POLL_S):
            if not threading.main_thread().is_alive():
                self.close()

    def _default_params(self) -> SamplingParams:
        found = GenerationDefaults.from_json(json.dumps(self.card.generation_config))
        known = {
            field.name: value
            for field in fields(found)
            if (value := getattr(found, field.name)) is not None
        }
        return replace(SamplingParams(), **known)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True, parse_special=True)
        return list(prompt)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode_rendered(self._template.render(TemplateInput(messages)))

    def _begin(
        self,
        ids: list[int],
        params: SamplingParams | None,
        stop: Sequence[str],
        seed: int | None,
        continues: bool,
    ) -> "_SubmittedRequest":
        """Submit at once. Raises what the engine refuses."""
        chosen = params or self.defaults
        key = self._new_key()
        request = Request(
            key=key,
            prompt_ids=tuple(ids),
            params=chosen,
            seed=secrets.randbits(63) if seed is None else seed,
        )
        generation = Generation(
            ids,
            chosen.n,
            self.tokenizer,
            tuple(stop),
            chosen.min_tokens,
            stop_ids={*self.card.eos_ids, *chosen.stop_token_ids},
            continues=continues,
        )
        inbox = self._submit(request)
        return _SubmittedRequest(generation, inbox, lambda choices: self._abort(key, choices))

    def _embedding(self, key: str, inbox: "queue.SimpleQueue[Event]") -> list[float]:
        """Waits for the end of a request that pools. Raises GenerationError."""
        values: Sequence[float] = ()
        try:
            while not isinstance(event := inbox.get(), Finished):
                if isinstance(event, RequestFailed):
                    raise GenerationError(event.message)
                if isinstance(event, Pooled):
                    values = event.values
        finally:
            self._abort(key, ())
        length = math.hypot(*values) if self.card.normalizes else 1.0
        return [value / length for value in values] if length else list(values)

    def _new_key(self) -> str:
        return f"llm-{next(self._keys)}"

    def _submit(self, request: Request) -> "queue.SimpleQueue[Event]":
        """Where its events come. Raises what the engine refuses."""
        if self._closed.is_set():
            raise RuntimeError("this LLM is closed")
        inbox = self._inboxes[request.key] = queue.SimpleQueue()
        try:
            self._thread.post(lambda engine: engine.submit(request)).result()
        except BaseException:
            del self._inboxes[request.key]
            raise
        return inbox

    def _abort(self, key: str, choices: Sequence[int]) -> None:
        """End choices of a request, or forget all of it if none is named."""
        if not choices:
            self._inboxes.pop(key, None)
        self._thread.post(lambda engine: engine.abort(key, choices))

    def _on_step(self, step: Step) -> None:
        for event in step.events:
            if inbox := self._inboxes.get(event.key):
                inbox.put(event)


class _SubmittedRequest:
    """A submitted request; `close` aborts what has not ended."""

    def __init__(
        self,
        generation: Generation,
        inbox: "queue.SimpleQueue[Event]",
        abort: Callable[[Sequence[int]], None],
    ) -> None:
        self._generation = generation
        self._inbox = inbox
        self._abort = abort

    def deltas(self) -> Iterator[TextDelta]:
        """New texts until the request has ended. Raises GenerationError."""
        generation = self._generation
        while not generation.done:
            delta = generation.take(self._inbox.get())
            if stopped := generation.take_stopped():
                self._abort(stopped)
            if delta is not None and (delta.text or delta.finish_reason):
                yield delta

    def result(self) -> Result:
        with closing(self):
            for _ in self.deltas():
                pass
        return self._generation.result()

    def close(self) -> None:
        self._abort(())


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one: a text, or a list whose items are token ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
