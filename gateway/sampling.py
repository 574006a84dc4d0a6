"""From what a client asked to the engine's sampling parameters; every number is bounded here.

REST and gRPC both come through `resolve`, so they refuse the same things with the same words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.gateway.text.generation import GenerationDefaults
from pdserve.protos.common_pb2 import (
    CONTEXT_LENGTH_EXCEEDED,
    INVALID_ARGUMENT,
    ModelCard,
    SamplingParams,
)
from pdserve.services.host.errors import ServiceError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_BIASES = 1024
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling as the client wrote it; None takes the model's default."""

    temperature: float | None = None
    top_k: int | None = None  # 0 and -1: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None  # None: what is left of the context
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: bool = False  # as many candidates as `logprobs`
    n: int = 1
    best_of: int | None = None  # None: n
    seed: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True


def refuse(param: str, message: str) -> ServiceError:
    return ServiceError(INVALID_ARGUMENT, message, param=param)


def check_range(
    param: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raises ServiceError unless low <= value <= high (low < value if open)."""
    if not low <= value <= high or (open_low and value == low):  # NaN compares false
        limits = f"above {low:g} and at most" if open_low else f"from {low:g} to"
        raise refuse(param, f"{param} must be {limits} {high:g}, not {str(value)[:40]}")


def check(wishes: RequestedSampling, card: ModelCard) -> None:
    """Bounds that do not depend on the prompt. Raises ServiceError naming the field."""
    w = wishes
    for param, value, low, high, open_low in (
        ("temperature", w.temperature, 0, 2, False),
        ("top_k", w.top_k, -1, MAX_TOP_K, False),
        ("top_p", w.top_p, 0, 1, True),
        ("min_p", w.min_p, 0, 1, False),
        ("repetition_penalty", w.repetition_penalty, 0, 10, True),
        ("presence_penalty", w.presence_penalty, -2, 2, False),
        ("frequency_penalty", w.frequency_penalty, -2, 2, False),
        ("n", w.n, 1, MAX_CHOICES, False),
        ("best_of", w.best_of, 1, MAX_CHOICES, False),
        (w.logprobs_field, w.logprobs, 0, MAX_LOGPROBS, False),
        ("min_tokens", w.min_tokens, 0, card.context_len, False),
        ("seed", w.seed, -(2**63), 2**64 - 1, False),
    ):
        if value is not None:
            check_range(param, value, low, high, open_low=open_low)
    if w.best_of is not None and w.best_of < w.n:
        raise refuse("best_of", f"best_of must be at least n ({w.n}), not {w.best_of}")
    if w.max_tokens is not None and w.max_tokens < 1:
        raise refuse(w.max_tokens_field, f"{w.max_tokens_field} must be at least 1")
    if len(w.stop) > MAX_STOPS:
        raise refuse("stop", f"at most {MAX_STOPS} stop strings, not {len(w.stop)}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in w.stop):
        raise refuse("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    if len(w.stop_token_ids) > MAX_STOP_IDS:
        raise refuse("stop_token_ids", f"at most {MAX_STOP_IDS} ids, not {len(w.stop_token_ids)}")
    if len(w.logit_bias) > MAX_BIASES:
        raise refuse("logit_bias", f"at most {MAX_BIASES} entries, not {len(w.logit_bias)}")
    for param, ids in (("stop_token_ids", w.stop_token_ids), ("logit_bias", w.logit_bias)):
        for token in ids:
            if not 0 <= token < card.vocab_size:
                raise refuse(param, f"token id {token} is not from 0 to {card.vocab_size - 1}")
    for token, bias in w.logit_bias.items():
        if not -100 <= bias <= 100:
            raise refuse("logit_bias", f"the bias of token {token} must be from -100 to 100")


def resolve(
    wishes: RequestedSampling,
    card: ModelCard,
    defaults: GenerationDefaults,
    prompt_len: int,
    param: str,
) -> SamplingParams:
    """The engine's parameters for a prompt of `prompt_len` tokens. All defaults are filled in but
    max_tokens: how much room n choices have is known to the engine alone, and 0 asks for it.

    `param` names the prompt's field. Raises ServiceError CONTEXT_LENGTH_EXCEEDED when prompt
    and answer can never fit, INVALID_ARGUMENT.
    """
    w = wishes
    left = card.context_len - prompt_len
    if prompt_len < 1:
        raise refuse(param, "the prompt has no tokens")
    if left < (w.max_tokens or 1):
        asked = f" and asks for {str(w.max_tokens)[:20]} more" if w.max_tokens else ""
        raise ServiceError(
            CONTEXT_LENGTH_EXCEEDED,
            f"the model's context is {card.context_len} tokens; "
            f"this request has {prompt_len} in its prompt{asked}",
            param=w.max_tokens_field if left >= 1 else param,
        )
    max_tokens = w.max_tokens or left
    if w.min_tokens > max_tokens:
        raise refuse("min_tokens", f"min_tokens must be at most max_tokens ({max_tokens})")
    top_k = _pick(w.top_k, defaults.top_k, 0)
    params = SamplingParams(
        temperature=_pick(w.temperature, defaults.temperature, 1.0),
        top_k=0 if top_k < 1 else min(int(top_k), card.vocab_size),
        top_p=_pick(w.top_p, defaults.top_p, 1.0),
        min_p=_pick(w.min_p, defaults.min_p, 0.0),
        repetition_penalty=_pick(w.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=w.presence_penalty,
        frequency_penalty=w.frequency_penalty,
        logit_bias=w.logit_bias,
        stop_token_ids=w.stop_token_ids,
        ignore_eos=w.ignore_eos,
        min_tokens=w.min_tokens,
        max_tokens=w.max_tokens or 0,
        n=w.best_of or w.n,
    )
    if w.logprobs is not None:
        params.logprobs = w.logprobs
    elif (w.best_of or w.n) > w.n:
        params.logprobs = 0  # to rank the candidates
    if w.prompt_logprobs:
        params.prompt_logprobs = w.logprobs or 0
    return params


def _pick(wish: float | None, default: float | None, otherwise: float) -> float:
    if wish is not None:
        return wish
    return otherwise if default is None else default
