"""Requests and events between protos and the engine's types."""

from collections.abc import Iterator, Sequence

from pdserve.engine.api.request import (
    ChoiceState,
    FinishReason,
    NewTokens,
    Request,
    SamplingParams,
    TokenLogprob,
)
from pdserve.protos import common_pb2 as pb
from pdserve.services.host.errors import ServiceError

_FINISH = {
    FinishReason.STOP: pb.STOP,
    FinishReason.LENGTH: pb.LENGTH,
    FinishReason.ABORTED: pb.ABORTED,
}
_FINISH_BACK = {wire: reason for reason, wire in _FINISH.items()}
MAX_CHOICES = 4096
MAX_LOGPROBS = 512  # in a message: one has at most 20 candidates of about 8 bytes


def to_request(key: str, start: pb.Start, prompt_ids: Sequence[int]) -> Request:
    """Raises ServiceError(INVALID_ARGUMENT); ranges are the engine's to check."""
    params = to_params(start.params)
    if len(start.choices) not in (0, params.n) or params.n > MAX_CHOICES:
        raise ServiceError(pb.INVALID_ARGUMENT, "one choice state per choice is needed", "n")
    choices = tuple(_choice(choice) for choice in start.choices)
    return Request(key, tuple(prompt_ids), params, start.seed, choices, start.cache_salt)


def to_params(params: pb.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults that common.proto names."""

    def given(name: str, default: float) -> float:
        return float(getattr(params, name)) if params.HasField(name) else default

    return SamplingParams(
        temperature=given("temperature", 1.0),
        top_k=params.top_k,
        top_p=given("top_p", 1.0),
        min_p=params.min_p,
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens or None,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        n=params.n or 1,
    )


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
    """Those of prompt tokens 1.., in parts."""
    for start in range(0, len(logprobs), MAX_LOGPROBS):
        yield pb.PromptLogprobs(
            request=request,
            attempt=attempt,
            position=start + 1,
            logprobs=[to_logprob(logprob) for logprob in logprobs[start : start + MAX_LOGPROBS]],
        )


def to_logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        logprob=logprob.logprob,
        top_ids=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def _choice(choice: pb.ChoiceState) -> ChoiceState:
    return ChoiceState(tuple(choice.generated_ids), _FINISH_BACK.get(choice.finish))
