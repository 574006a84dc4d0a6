"""Converts requests and events between protobuf messages and the engine's types."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.engine.api import (
    MAX_CHOICES,
    ChoiceState,
    FinishReason,
    Grammar,
    NewTokens,
    Pooled,
    Request,
    SamplingParams,
    ThinkingBudget,
    TokenLogprob,
)
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.capabilities import SCORE, pooling_of
from pdserve.services.common.errors import ServiceError

_FINISH = {
    FinishReason.STOP: pb.STOP,
    FinishReason.LENGTH: pb.LENGTH,
    FinishReason.ABORTED: pb.ABORTED,
}
_FINISH_BACK = {wire: reason for reason, wire in _FINISH.items()}
SCORES_PER_MESSAGE = 512  # each has at most 20 candidates of about 8 bytes


def to_request(key: str, start: pb.Start, prompt_ids: Sequence[int]) -> Request:
    """Convert a Start message to a request of the engine. Raises ServiceError(INVALID_ARGUMENT) if
    `n` exceeds MAX_CHOICES, or if `choices` is neither empty nor has n states; the engine checks
    the ranges of other fields."""
    params = to_params(start.params)
    if len(start.choices) not in (0, params.n) or params.n > MAX_CHOICES:
        text = f"n must be at most {MAX_CHOICES}, and choices must be empty or have n entries"
        raise ServiceError(pb.INVALID_ARGUMENT, text, "n")
    choices = tuple(_choice(choice) for choice in start.choices)
    return Request(
        key,
        tuple(prompt_ids),
        params,
        start.seed,
        choices,
        start.cache_salt,
        tenant=start.tenant,
        pool=start.pool,
        priority=start.priority,
    )


def pools_otherwise(start: pb.Start, card: pb.ModelCard) -> bool:
    """Return whether the worker does not pool a prompt as Start requests. A router of release 0.1
    does not choose the worker by that, and a gateway of that release, which does not name it,
    expects an embedding."""
    own = pooling_of(card)
    return start.pool and start.pooling != own and bool(start.pooling or own == SCORE)


def to_params(params: pb.SamplingParams) -> SamplingParams:
    """Convert sampling parameters from a protobuf message, field by field; absent fields take the
    defaults of SamplingParams."""
    arguments: dict[str, Any] = {field.name: value for field, value in params.ListFields()}
    if params.logit_bias:
        arguments["logit_bias"] = dict(params.logit_bias)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if name in arguments:
            arguments[name] = tuple(arguments[name])
    if params.bad_words:
        arguments["bad_words"] = tuple(tuple(word.ids) for word in params.bad_words)
    if params.HasField("grammar"):
        grammar = params.grammar
        arguments["grammar"] = Grammar(grammar.source, tuple(grammar.begins_after))
    if params.HasField("thinking"):
        budget = params.thinking
        arguments["thinking"] = ThinkingBudget(
            budget.max_tokens, tuple(budget.end_ids), tuple(budget.start_ids)
        )
    return SamplingParams(**arguments)


def to_tokens(request: str, attempt: bytes, epoch: int, event: NewTokens) -> pb.Tokens:
    return pb.Tokens(
        request=request,
        attempt=attempt,
        epoch=epoch,
        choice=event.choice,
        position=event.position,
        ids=event.ids,
        logprobs=[to_logprob(logprob) for logprob in event.logprobs],
        finish=_FINISH[event.finish] if event.finish is not None else None,
    )


def to_prompt_logprobs(
    request: str, attempt: bytes, logprobs: Sequence[TokenLogprob]
) -> Iterator[pb.PromptLogprobs]:
    """Yield messages with the log-probabilities of the prompt's tokens from the second token on, at
    most SCORES_PER_MESSAGE in each message."""
    for start in range(0, len(logprobs), SCORES_PER_MESSAGE):
        yield pb.PromptLogprobs(
            request=request,
            attempt=attempt,
            position=start + 1,
            logprobs=[
                to_logprob(logprob) for logprob in logprobs[start : start + SCORES_PER_MESSAGE]
            ],
        )


def to_embedding(request: str, attempt: bytes, epoch: int, event: Pooled) -> pb.Embedding:
    return pb.Embedding(request=request, attempt=attempt, epoch=epoch, values=event.values)


def to_logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        logprob=logprob.logprob,
        top_ids=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def _choice(choice: pb.ChoiceState) -> ChoiceState:
    return ChoiceState(tuple(choice.generated_ids), _FINISH_BACK.get(choice.finish))
