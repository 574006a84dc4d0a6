"""`pdserve.Engine`: the Python API for asyncio. Requests of all tasks share the batch.

The class is named AsyncEngine here because engine/engine.py already has an Engine, which steps the
model for AsyncEngine, for LLM and for the workers of a server.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Unpack

from pdserve.engine.api import Request
from pdserve.engine.checkpoints import CardData
from pdserve.llm.chat import ChatOptions
from pdserve.llm.generation import Embedding, Generation, PreparedRequest, RequestEvent
from pdserve.llm.model import (
    Deliveries,
    InProcessModel,
    Model,
    TemplateFile,
    config_of,
    put,
    template_of,
)
from pdserve.llm.outputs import Conversation, OutputDelta, RequestOutput
from pdserve.llm.prompts import Prompt, as_list
from pdserve.llm.sampling import SamplingParams
from pdserve.text import AUTO, ParserChoice
from pdserve.text.tokenizer.tokenizer import Tokenizer


class AsyncEngine:
    """A model that runs in this process, for asyncio; exported as `pdserve.Engine`.

    >>> async with Engine(EngineConfig(kv_tokens=8192)) as engine:
    ...     print((await engine.chat([{"role": "user", "content": "Hello!"}])).text)

    An engine belongs to the event loop that started it. Cancelling a task or closing a stream
    aborts its request.
    """

    def __init__(
        self,
        config: Model = "",
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        chat_template: TemplateFile = None,
    ) -> None:
        """Check the options; `start` loads the model. `config` is a model or an EngineConfig, the
        other arguments are those of LLM.
        Raises TypeError, and ValueError for a bad value."""
        self._config = config_of(config, {}, "Engine")
        self._parsers = ParserChoice(tool_parser, reasoning_parser)
        self._template = template_of(chat_template)
        self._starting = asyncio.Lock()
        self._loaded: InProcessModel | None = None

    async def start(self) -> None:
        """Load the model; `async with` calls this. If cancelled, the model is closed once loaded.
        Raises CheckpointError."""
        async with self._starting:
            if self._loaded is None:
                loading = asyncio.ensure_future(self._load())
                try:
                    self._loaded = await asyncio.shield(loading)
                except asyncio.CancelledError:
                    loading.add_done_callback(_close_loaded)
                    raise

    async def _load(self) -> InProcessModel:
        loop = asyncio.get_running_loop()

        def deliver(deliveries: Deliveries) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(put, deliveries)

        return await asyncio.to_thread(
            InProcessModel, self._config, self._parsers, deliver, self._template
        )

    async def close(self) -> None:
        """Stop the engine and fail the requests that still run. May be called again."""
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.close)

    async def __aenter__(self) -> "AsyncEngine":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def card(self) -> CardData:
        """The model's properties: its name, context_len, vocab_size and others."""
        return self._model.card

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: text to token ids and back."""
        return self._model.prompts.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return the params used by default: the model's recommendation, else pdserve's values."""
        return self._model.prompts.default_params()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """Continue a prompt (text or token ids). Waiting requests with a lower `priority` run
        first.

        Raises InvalidRequest, ContextLengthExceeded, GenerationError.
        """
        return await self._complete(await self._text(prompt, sampling_params, priority))

    async def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the continuation of a prompt. Raises like `generate`."""
        prepared = await self._text(prompt, sampling_params, priority)
        async with aclosing(self._deltas(prepared.request, self._generation(prepared))) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Answer a conversation; arguments and errors are those of `LLM.chat`."""
        chat = await self._chat(messages, sampling_params, priority, **options)
        return await self._complete(chat)

    async def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the answer to a conversation; each tool call arrives complete, in one delta."""
        prepared = await self._chat(messages, sampling_params, priority, **options)
        async with aclosing(self._deltas(prepared.request, self._generation(prepared))) as deltas:
            async for delta in deltas:
                yield delta

    def apply_chat_template(
        self,
        messages: Conversation,
        **options: Unpack[ChatOptions],
    ) -> str:
        """Return the prompt that `chat` renders for a conversation. Raises InvalidRequest."""
        return self._model.prompts.rendered(messages, **options)

    async def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """Return the embedding of each prompt; details and errors are those of `LLM.embed`."""
        return list(await asyncio.gather(*map(self._embedding, as_list(prompts))))

    @property
    def _model(self) -> InProcessModel:
        if self._loaded is None:
            raise RuntimeError("this Engine is not started; use `async with`, or start()")
        return self._loaded

    async def _text(
        self, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> PreparedRequest:
        return await asyncio.to_thread(self._model.prompts.text, prompt, params, priority)

    async def _chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        priority: int,
        **options: Unpack[ChatOptions],
    ) -> PreparedRequest:
        chat = self._model.prompts.chat
        return await asyncio.to_thread(chat, messages, params, priority, **options)

    def _generation(self, prepared: PreparedRequest) -> Generation:
        return Generation(prepared, self.tokenizer)

    async def _complete(self, prepared: PreparedRequest) -> RequestOutput:
        generation = self._generation(prepared)
        await self._run(prepared.request, generation)
        return generation.result()

    async def _embedding(self, prompt: Prompt) -> list[float]:
        request = await asyncio.to_thread(self._model.prompts.embedding, prompt)
        pooled = Embedding(normalizes=self.card.normalizes)
        await self._run(request, pooled)
        return pooled.result()

    async def _run(self, request: Request, collector: Generation | Embedding) -> None:
        async with aclosing(self._deltas(request, collector)) as deltas:
            async for _ in deltas:
                pass

    async def _deltas(
        self, request: Request, collector: Generation | Embedding
    ) -> AsyncGenerator[OutputDelta, None]:
        """Run a request and yield its deltas; abort it if the consumer stops early."""
        inbox: asyncio.Queue[RequestEvent] = asyncio.Queue()
        key = self._model.submit(request, inbox)
        try:
            while not collector.done:
                delta = collector.take(await inbox.get())
                if stopped := collector.take_stopped():
                    self._model.abort(key, stopped)
                if delta is not None:
                    yield delta
        finally:
            self._model.abort(key)


def _close_loaded(loading: "asyncio.Future[InProcessModel]") -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
