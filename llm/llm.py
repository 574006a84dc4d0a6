"""`pdserve.LLM`: the engine and the text layer in this process, without servers.

Several threads may call its methods; their requests share the batch.
"""

import queue
import sys
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Unpack, overload

from pdserve.cli.progress import progress_on
from pdserve.engine.api import Request
from pdserve.engine.checkpoints import CardData
from pdserve.llm.chat import ChatOptions, conversations
from pdserve.llm.generation import Embedding, Generation, PreparedRequest, RequestEvent
from pdserve.llm.model import InProcessModel, Model, TemplateFile, config_of, put, template_of
from pdserve.llm.outputs import Conversation, OutputDelta, RequestOutput
from pdserve.llm.prompts import Prompt, as_list, per_prompt
from pdserve.llm.sampling import SamplingParams
from pdserve.text import AUTO, ParserChoice
from pdserve.text.tokenizer.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int]
Run = tuple[Request, Generation | Embedding]


class LLM:
    """A model that runs in this process.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "Hello!"}]).text)
    """

    def __init__(
        self,
        model: Model = "",
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        chat_template: TemplateFile = None,
        **options: Any,
    ) -> None:
        """Load `model`, a value of `pdserve up --model` or an EngineConfig. `options` are the other
        fields of EngineConfig (`weights="bf16"`, `kv_tokens=8192`, ...). `tool_parser` and
        `reasoning_parser` take the values of these options of `pdserve gateway`, and so does
        `chat_template`, the path of a Jinja file that replaces the model's template.

        Raises TypeError for an unknown option, ValueError for a bad value, CheckpointError.
        """
        config = config_of(model, options, "LLM")
        parsers, template = ParserChoice(tool_parser, reasoning_parser), template_of(chat_template)
        self._model = InProcessModel(config, parsers, put, template)

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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Priority = 0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); results are in the order of the prompts.

        `sampling_params` and `priority` hold one value for all prompts or one for each; waiting
        requests with a lower priority run first. `progress` shows the progress on stderr. Raises
        InvalidRequest, ContextLengthExceeded, GenerationError.
        """
        prompt_list = as_list(prompts)
        params = per_prompt("sampling_params", sampling_params, len(prompt_list))
        priorities = per_prompt("priority", priority, len(prompt_list))
        prepared = map(self._model.prompts.text, prompt_list, params, priorities)
        return self._generate(list(prepared), progress)

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[OutputDelta, None, None]:
        """Stream the continuation of a prompt. Closing the iterator aborts the request.

        Raises like `generate`; errors from the engine come at the first iteration.
        """
        return self._stream(self._model.prompts.text(prompt, sampling_params, priority))

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        progress: bool = False,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        priority: Priority = 0,
        progress: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        priority: Priority = 0,
        progress: bool = False,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation of {"role", "content"} messages, or several.

        `tools` are functions in OpenAI's format that the model may call (`tool_choice`: auto, none,
        required, or one by name); the calls are in the outputs' `tool_calls`. With
        `continue_final_message` the answer continues the last message. Raises like `generate`.
        """
        batch, is_single = conversations(messages)
        params = per_prompt("sampling_params", sampling_params, len(batch))
        priorities = per_prompt("priority", priority, len(batch))
        chats = zip(batch, params, priorities, strict=True)
        prepared = [self._model.prompts.chat(*chat, **options) for chat in chats]
        outputs = self._generate(prepared, progress)
        return outputs[0] if is_single else outputs

    def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **options: Unpack[ChatOptions],
    ) -> Generator[OutputDelta, None, None]:
        """Stream the answer to a conversation; each tool call arrives complete, in one delta.
        Arguments are those of `chat`; errors are those of `generate_stream`."""
        prompts = self._model.prompts
        return self._stream(prompts.chat(messages, sampling_params, priority, **options))

    def apply_chat_template(
        self,
        messages: Conversation,
        **options: Unpack[ChatOptions],
    ) -> str:
        """Return the prompt that `chat` renders for a conversation. Raises InvalidRequest."""
        return self._model.prompts.rendered(messages, **options)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, progress: bool = False
    ) -> list[list[float]]:
        """Return the embedding of each prompt (text or token ids), in order, scaled to length 1 if
        the model normalizes. Raises like `generate`; InvalidRequest if the model is generative and
        the option `pool` is not set, or if it scores pairs of texts."""
        normalizes = self.card.normalizes
        runs: list[Run] = [
            (self._model.prompts.embedding(prompt), Embedding(normalizes=normalizes))
            for prompt in as_list(prompts)
        ]
        embeddings: list[list[float]] = self._run(runs, progress)
        return embeddings

    def close(self) -> None:
        """Stop the engine and fail the requests that still run. May be called again."""
        self._model.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _generate(self, prepared: list[PreparedRequest], progress: bool) -> list[RequestOutput]:
        runs: list[Run] = [(item.request, Generation(item, self.tokenizer)) for item in prepared]
        outputs: list[RequestOutput] = self._run(runs, progress)
        return outputs

    def _run(self, runs: Sequence[Run], progress: bool) -> list[Any]:
        """Run all requests and return their results in order. Process events as they arrive, so
        that a stop string ends its request at once."""
        inbox: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        running: dict[str, Generation | Embedding] = {}
        view = progress_on(sys.stderr) if progress else None
        try:
            for request, collector in runs:
                running[self._model.submit(request, inbox)] = collector
            while running:
                event = inbox.get()
                if event.key not in running:  # the request ended before `close` failed all
                    continue
                collector = running[event.key]
                collector.take(event)
                if stopped := collector.take_stopped():
                    self._model.abort(event.key, stopped)
                if collector.done:
                    del running[event.key]
                    if view is not None:
                        view.update("prompts", (len(runs) - len(running)) / len(runs))
            return [collector.result() for _, collector in runs]
        finally:
            if view is not None:
                view.close()
            for key in running:  # after an error no caller waits for the others
                self._model.abort(key)

    def _stream(self, prepared: PreparedRequest) -> Generator[OutputDelta, None, None]:
        generation = Generation(prepared, self.tokenizer)
        inbox: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        key = self._model.submit(prepared.request, inbox)
        try:
            while not generation.done:
                delta = generation.take(inbox.get())
                if stopped := generation.take_stopped():
                    self._model.abort(key, stopped)
                if delta is not None:
                    yield delta
        finally:
            self._model.abort(key)
