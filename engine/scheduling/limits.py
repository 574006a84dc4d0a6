"""Limits of an engine, and the check of a request against them. Pure."""

from dataclasses import dataclass

from pdserve.engine.api import (
    BOUNDS,
    ContextLengthExceeded,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
)
from pdserve.engine.constraints import check_constraints
from pdserve.engine.kv import blocks_for

NO_EMBEDDINGS = "The model does not support Embeddings API"  # vLLM's words
REMEDY = "; start it with --pool last or mean"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine, such as its context length and batch size. One step has room for every
    running sequence and one whole prefill chunk.

    Raises ValueError if `step_tokens` is too small for that.
    """

    vocab_size: int
    context_len: int  # tokens, prompt and answer together
    block_size: int
    num_blocks: int  # of a layer group with full attention
    max_running: int  # rows of a batch
    chunk_size: int  # tokens; chunks end at its multiples
    step_tokens: int = 0  # 0: max_running + chunk_size
    # A tenant's maximum in a step while several tenants are active: decode rows, and prompt
    # tokens beyond the first chunk of the step; 0: step_tokens.
    shared_step_tokens: int = 0
    max_waiting: int = 256
    eos_ids: frozenset[int] = frozenset()
    # "last", "mean" or "cls" of a model that only embeds or scores, which generates nothing.
    pooling: str = ""
    pool: str = ""  # "last" or "mean" of a generating model that also embeds
    scores: bool = False  # the model is a reranker whose score is the probability of a token

    def __post_init__(self) -> None:
        if not self.step_tokens:
            object.__setattr__(self, "step_tokens", self.max_running + self.chunk_size)
        if not self.shared_step_tokens:
            object.__setattr__(self, "shared_step_tokens", self.step_tokens)
        if self.step_tokens < self.max_running + self.chunk_size:
            raise ValueError(
                f"step_tokens {self.step_tokens} is less than max_running {self.max_running} "
                f"+ chunk_size {self.chunk_size}: a step must fit all sequences and one chunk"
            )

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the token ids that end a choice under these sampling parameters."""
        eos = frozenset() if params.ignore_eos else self.eos_ids
        return eos.union(params.stop_token_ids)

    def finish_of(
        self, ids: list[int], params: SamplingParams, max_tokens: int
    ) -> FinishReason | None:
        """Return why a choice with these generated ids has ended: STOP or LENGTH; None if it has
        not ended."""
        if ids and len(ids) > params.min_tokens:
            last = ids[-1]
            if last in params.stop_token_ids or (not params.ignore_eos and last in self.eos_ids):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= max_tokens else None

    def check(self, request: Request) -> int:
        """Check a request against these limits; return the maximum number of tokens that each
        choice may generate, 0 for a request that generates none. Raises InvalidRequest or
        ContextLengthExceeded."""
        self._check_sampling(request)
        params, prompt_len = request.params, len(request.prompt_ids)
        if not prompt_len:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.choices and len(request.choices) != params.n:
            raise InvalidRequest(
                f"the request has {len(request.choices)} choices, but n is {params.n}", "n"
            )
        for ids in (request.prompt_ids, *(c.generated_ids for c in request.choices)):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                raise InvalidRequest(
                    f"a token id is outside the vocabulary of {self.vocab_size} ids", "prompt"
                )
        if request.pool and not (self.pooling or self.pool):
            raise InvalidRequest(NO_EMBEDDINGS + ("" if self.scores else REMEDY), "model")
        if self.pooling and not request.pool:
            raise InvalidRequest("The model does not support text generation", "model")
        if request.pool:
            _check_pooled(params)
        if not request.generates:
            if params.prompt_logprobs is not None or request.choices:
                raise InvalidRequest(
                    "a request that generates no tokens cannot have choices or prompt_logprobs",
                    "prompt",
                )
            if prompt_len > self.context_len:
                raise ContextLengthExceeded(self._too_long(prompt_len, 0, 1), "prompt")
            if blocks_for(prompt_len, self.block_size) > self.num_blocks:
                raise ContextLengthExceeded(
                    f"the prompt has {prompt_len} tokens, but the KV pool holds only "
                    f"{self.num_blocks * self.block_size}",
                    "prompt",
                )
            return 0
        max_new_tokens = min(
            self.context_len - prompt_len, self._pool_capacity(prompt_len, params.n)
        )
        if params.max_tokens is None:
            if max_new_tokens < 1:
                raise ContextLengthExceeded(self._too_long(prompt_len, 1, params.n), "prompt")
            max_tokens = max_new_tokens
        else:
            max_tokens = params.max_tokens
            if max_tokens > max_new_tokens:
                too_long = self._too_long(prompt_len, max_tokens, params.n)
                raise ContextLengthExceeded(too_long, "max_tokens")
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({max_tokens})", "min_tokens"
            )
        return max_tokens

    def _check_sampling(self, request: Request) -> None:
        """Raise InvalidRequest if a sampling parameter is out of range or has an invalid token
        id."""
        params = request.params
        for name, bounds in BOUNDS.items():
            setting = request.seed if name == "seed" else getattr(params, name)
            for value in setting.values() if isinstance(setting, dict) else (setting,):
                if value is not None and not bounds.engine.has(value):
                    raise InvalidRequest(f"{name} must be {bounds.engine}, not {value}", name)
        for name in ("logit_bias", "stop_token_ids"):
            if not all(0 <= token < self.vocab_size for token in getattr(params, name)):
                raise InvalidRequest(f"{name} has a token id outside the vocabulary", name)
        for name, value, limit, limit_name in (
            ("logprobs", params.logprobs, self.vocab_size, "the vocabulary's size"),
            ("prompt_logprobs", params.prompt_logprobs, self.vocab_size, "the vocabulary's size"),
            ("n", params.n, self.max_running, "the batch's size"),
        ):
            if value is not None and value > limit:
                raise InvalidRequest(f"{name} must be at most {limit}, {limit_name}", name)
        check_constraints(params, self.vocab_size, self.eos_ids)

    def _pool_capacity(self, prompt_len: int, n: int) -> int:
        """Return how many tokens each of `n` choices could generate if the request had the whole KV
        pool. Choices share the full blocks of the prompt, and the last token of a choice needs no
        KV."""
        shared = prompt_len // self.block_size
        blocks_per_choice = (self.num_blocks - shared) // n
        return max(0, blocks_per_choice * self.block_size - prompt_len % self.block_size + 1)

    def _too_long(self, prompt_len: int, max_tokens: int, n: int) -> str:
        """Return the error message for a request that exceeds the context or the KV pool, in
        OpenAI's words, because clients parse them."""
        each = f" of each of {n} choices" if n > 1 else ""
        return (
            f"This model's maximum context length is {self.context_len} tokens. However, you "
            f"requested {prompt_len + n * max_tokens} tokens ({prompt_len} in the prompt, "
            f"{max_tokens} in the completion{each}), and the KV pool holds "
            f"{self.num_blocks * self.block_size}. Please reduce the length of the prompt or "
            "completion."
        )


def _check_pooled(params: SamplingParams) -> None:
    """Raise InvalidRequest if an embedding request sets parameters that only apply to generated
    tokens."""
    if params.n > 1:
        raise InvalidRequest("n must be 1 for an embedding", "n")
    for name in ("allowed_token_ids", "bad_words", "grammar", "thinking"):
        if getattr(params, name):
            raise InvalidRequest(f"an embedding does not support {name}", name)
