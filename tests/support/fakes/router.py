"""A router with scripted answers, and a small model for it to serve: no process, no socket.

The tokenizer is byte-level with a few merges, so that characters and stop strings cross tokens.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.gateway.router_client.upstream import TakeToken
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2, router_pb2
from pdserve.services.common.errors import ServiceError

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"))

Event = router_pb2.RequestEvent
Play = Callable[["FakeRouter", pb.Start], AsyncGenerator[Event, None]]


def tokenizer_json() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer.to_str().encode()


def served(
    name: str = "tiny",
    context_len: int = 512,
    generation: dict[str, object] | None = None,
    template: str = "",
) -> tuple[pb.ModelCard, dict[str, bytes]]:
    """Return a card and the blobs that it names; `template`: replaces TEMPLATE."""
    words = tokenizer_json()
    reader = tokenizers.Tokenizer.from_str(words.decode())
    contents = [words, (template or TEMPLATE).encode(), json.dumps(generation or {}).encode()]
    blobs = {hashlib.sha256(data).hexdigest(): data for data in contents}
    digests = [hashlib.sha256(data).hexdigest() for data in contents]
    card = pb.ModelCard(
        name=name,
        architecture="llama",
        context_len=context_len,
        vocab_size=reader.get_vocab_size() + 5,
        eos_ids=[reader.token_to_id("<|im_end|>"), reader.token_to_id("<|endoftext|>")],
        tokenizer_digest=digests[0],
        template_digest=digests[1],
        generation_config_digest=digests[2],
        kv_identity=pb.KvIdentity(
            digest=b"\1\2",
            weights="ab" * 32,
            quantization="Q4_1",
            tokenizer="7" * 64,
            numerics="torch-f32",
        ),
        created=1700000000,
        weights_bytes=98,
    )
    return card, blobs


def with_tokenizer(
    card: pb.ModelCard,
    blobs: dict[str, bytes],
    tokenizer: bytes,
    eos: Sequence[str],
    bos: str = "",
) -> None:
    """Return a card with another tokenizer; `eos`, `bos`: texts of tokens."""
    words = tokenizers.Tokenizer.from_buffer(tokenizer)
    card.tokenizer_digest = hashlib.sha256(tokenizer).hexdigest()
    card.vocab_size = max(words.get_vocab().values()) + 1
    card.eos_ids[:] = [words.token_to_id(text) for text in eos]
    if bos:
        card.has_bos, card.bos_id = True, words.token_to_id(bos)
    blobs[card.tokenizer_digest] = tokenizer


def thinking_model() -> tuple[list[pb.ModelCard], dict[str, bytes]]:
    """Return card and blobs of a model that reasons between <think> and </think>."""
    card, blobs = served(template=TEMPLATE + "{# </think> #}")
    return [card], blobs


class FakeRouter:
    """An Upstream; `play` makes its answers. Records its requests."""

    def __init__(
        self,
        play: Play,
        cards: Sequence[pb.ModelCard] | None = None,
        blobs: dict[str, bytes] | None = None,
    ) -> None:
        card, its_blobs = served()
        self.play = play
        self.cards = [card] if cards is None else list(cards)
        self.blobs = its_blobs if blobs is None else blobs
        self.words = tokenizers.Tokenizer.from_buffer(tokenizer_json())
        self.starts: list[pb.Start] = []
        self.cancels: list[tuple[str, tuple[int, ...]]] = []
        self.left: list[str] = []  # requests whose iterator was closed before the end
        self.closed = asyncio.Event()  # an iterator was closed
        self.view: router_pb2.FleetView | None = router_pb2.FleetView(
            workers=[
                router_pb2.WorkerView(
                    hello=fleet_pb2.WorkerHello(
                        role=fleet_pb2.DECODE, address="127.0.0.1:1", card=self.cards[0],
                        block_size=16,
                    ),
                    load=fleet_pb2.Load(
                        running=3, waiting=2, blocks_total=10, blocks_free=4, blocks_used=3,
                        blocks_cached=2, blocks_reserved=1, preemptions=5, prefix_queries=100,
                        prefix_hits=60,
                        transports=[
                            fleet_pb2.TransportCounters(
                                transport="tcp", bytes=1000, frames=7, seconds=0.5, refused=1
                            )
                        ],
                    ),
                    state="live",
                )
            ],
            prefill_local=11,
            prefill_remote=4,
        ) if self.cards else router_pb2.FleetView()  # fmt: skip

    def open(
        self, start: pb.Start, take_token: TakeToken[Any] | None = None
    ) -> AsyncGenerator[Event, None]:
        self.starts.append(start)
        return self._events(start, take_token)

    async def _events(
        self, start: pb.Start, take_token: TakeToken[Any] | None
    ) -> AsyncGenerator[Event | Any, None]:
        """Pass every second event that has only one token to `take_token`."""
        ended = False
        events = self.play(self, start)
        try:
            async for event in events:
                ended = event.WhichOneof("event") in ("finished", "failed")
                tokens = event.tokens
                plain = len(tokens.ids) == 1 and not (tokens.logprobs or tokens.finish)
                if take_token is not None and plain and tokens.position % 2:
                    item = take_token(tokens.choice, tokens.ids[0])
                    if item is not None:
                        yield item
                    continue
                yield event
                if ended:
                    return
        finally:
            if not ended:
                self.left.append(start.request)
                self.closed.set()
            await events.aclose()

    def cancel(self, request: str, choices: Sequence[int] = ()) -> None:
        self.cancels.append((request, tuple(choices)))

    async def models(self) -> Sequence[pb.ModelCard]:
        return self.cards

    async def blob(self, digest: str) -> bytes:
        return self.blobs[digest]

    async def fleet(self) -> router_pb2.FleetView:
        if self.view is None:
            raise ServiceError(pb.UNAVAILABLE, "no router can be reached")
        return self.view

    def encode(self, text: str) -> list[int]:
        return list(self.words.encode(text, add_special_tokens=False).ids)

    @property
    def eos(self) -> int:
        return int(self.words.token_to_id("<|im_end|>"))


def logprob(position: int, choice: int = 0) -> pb.TokenLogprob:
    """Return the score that the fakes give a token: lower with each position and choice."""
    return pb.TokenLogprob(logprob=-0.5 * (position + 1) - choice)


def scored(token: int, position: int, choice: int, num_top: int) -> pb.TokenLogprob:
    score = logprob(position, choice)
    for rank in range(num_top):
        score.top_ids.append(token if rank == 0 else (token + rank) % 256)
        score.top_logprobs.append(score.logprob - rank)
    return score


def placed(start: pb.Start) -> Event:
    placement = pb.Placement(attempt=b"a" * 16, decode_incarnation=b"d" * 16, decode_address="d:1")
    return Event(
        placed=router_pb2.Placed(request=start.request, epoch=start.epoch, placement=placement)
    )


def tokens(
    start: pb.Start,
    ids: Sequence[int],
    position: int,
    choice: int = 0,
    finish: int = pb.FINISH_REASON_UNSPECIFIED,
) -> Event:
    scores = []
    for offset, token in enumerate(ids if start.params.HasField("logprobs") else ()):
        score = scored(token, position + offset, choice, start.params.logprobs)
        for request in start.params.logprob_token_ids:
            score.top_ids.append(request)
            score.top_logprobs.append(-9.0 - request)
        scores.append(score)
    return Event(
        tokens=pb.Tokens(
            request=start.request, epoch=start.epoch, choice=choice, position=position, ids=ids,
            logprobs=scores, finish=finish,
        )
    )  # fmt: skip


def finished(start: pb.Start, **fields: object) -> Event:
    phases = pb.Phases(queue_s=0.01, prefill_s=0.02, transfer_s=0.003, first_token_s=0.004)
    return Event(
        finished=pb.Finished(request=start.request, epoch=start.epoch, phases=phases, **fields)  # type: ignore[arg-type]
    )


def failed(start: pb.Start, code: int, message: str = "no", retry_after_ms: int = 0) -> Event:
    failure = pb.Failure(code=code, message=message, retry_after_ms=retry_after_ms)
    return Event(failed=pb.Failed(request=start.request, epoch=start.epoch, failure=failure))


def saying(*texts: str, cached: int = 0) -> Play:
    """Return a script: each choice generates its text (the last one again if there are more
    choices), a token at a time, round robin; then eos. Obeys max_tokens, ignore_eos and cancelled
    choices.
    """

    async def play(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        yield placed(start)
        if start.params.HasField("prompt_logprobs"):
            num_top = start.params.prompt_logprobs
            scores = [
                scored(token, position, 0, num_top)
                for position, token in enumerate(start.prompt_ids[1:])
            ]
            half = len(scores) // 2
            for at, part in ((1, scores[:half]), (1 + half, scores[half:])):
                yield Event(
                    prompt_logprobs=pb.PromptLogprobs(
                        request=start.request, position=at, logprobs=part
                    )
                )
        width = max(1, start.params.n)
        most = start.params.max_tokens or 512 - len(start.prompt_ids)
        lines = []
        for choice in range(width):
            ids = router.encode(texts[min(choice, len(texts) - 1)])
            lines.append(ids if start.params.ignore_eos else [*ids, router.eos])
        open_choices = set(range(width))
        position = 0
        while open_choices:
            for choice in sorted(open_choices):
                cancelled = any(
                    request == start.request and (not named or choice in named)
                    for request, named in router.cancels
                )
                if cancelled:
                    open_choices.discard(choice)
                    yield tokens(start, [], position, choice, pb.ABORTED)
                    continue
                line = lines[choice]
                token = line[position % len(line)]
                finish = pb.FINISH_REASON_UNSPECIFIED
                if token in (router.eos, *start.params.stop_token_ids):
                    finish = pb.STOP
                elif position + 1 >= most:
                    finish = pb.LENGTH
                if finish:
                    open_choices.discard(choice)
                yield tokens(start, [token], position, choice, finish)
            position += 1
            await asyncio.sleep(0)
        yield finished(start, cached_tokens=cached)

    return play
