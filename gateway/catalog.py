"""Served models as the gateway uses them: card, tokenizer, template, generation defaults.

Invariant: objects built from a model's files are cached by the files' digests, so a model that
other workers serve, or that has another name, is loaded once.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdserve.gateway.model_overrides import NO_OVERRIDES, ModelOverrides
from pdserve.gateway.router_client import Upstream
from pdserve.protos.common_pb2 import (
    INVALID_ARGUMENT,
    MODEL_NOT_FOUND,
    UNAVAILABLE,
    ModelCard,
)
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.text import ParserChoice, Preparation, UnsupportedTokenizer
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tool_parsers import FALLBACK_PARSER
from pdserve.text.workers import LoadedTokenizer, TokenizerPool

log = logging.getLogger(__name__)
Key = tuple[str, str, str]  # digests of tokenizer, template and generation defaults

DETECTED_PARSERS = ParserChoice()
MAX_LOADED = 32  # tokenizers kept loaded; the least recently used are dropped
REFUSED_S = 60.0  # pause before files that cannot be loaded are tried again


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients can name. `preparation`: the steps that prepare requests for it."""

    card: ModelCard
    text: LoadedTokenizer
    preparation: Preparation


class Catalog:
    """Served models by the names that clients use: a model's own name, or an alias."""

    def __init__(
        self,
        upstream: Upstream,
        text_pool: TokenizerPool,
        aliases: Sequence[str] = (),
        any_model: bool = False,
        parsers: ParserChoice = DETECTED_PARSERS,
        strict_max_tokens: bool = False,
        overrides: ModelOverrides = NO_OVERRIDES,
    ) -> None:
        """`aliases`: NAME=MODEL, or NAME alone for the only served model. `any_model`: any unknown
        name means the only served model. `parsers`, `strict_max_tokens`: as in Preparation.
        `overrides`: what replaces the models' own files."""
        self._aliases = dict(_alias(text) for text in aliases)
        self._any_model = any_model
        self._parsers = parsers
        self._strict_max_tokens = strict_max_tokens
        self._overrides = overrides
        self.max_new_tokens = overrides.max_new_tokens
        self._upstream = upstream
        self._text_pool = text_pool
        self._seen: dict[str, ModelCard] = {}
        self._loads: dict[Key, asyncio.Task[LoadedTokenizer]] = {}
        self._refused: dict[Key, tuple[str, float]] = {}  # reason and time
        self._closing: set[asyncio.Task[None]] = set()
        self._failures: dict[str, str] = {}  # last logged failure by model

    async def cards(self) -> Sequence[ModelCard]:
        """Return the models that live workers serve now."""
        cards = await self._upstream.models()
        self._remember(cards)
        return cards

    def _remember(self, cards: Sequence[ModelCard]) -> None:
        for card in cards:
            self._seen[card.name] = card
        while len(self._seen) > MAX_LOADED:
            del self._seen[next(iter(self._seen))]

    async def listed(self) -> dict[str, ModelCard]:
        """Return the live models by the names that clients may use: model names in order, then
        aliases."""
        served = {card.name: card for card in await self.cards()}
        only_card = next(iter(served.values())) if len(served) == 1 else None
        cards: dict[str, ModelCard] = {}
        for name in (*sorted(served), *self._aliases):
            model = self._model(name, self._seen.keys() | served.keys())
            card = only_card if model == "" else served.get(model or "")
            if card is not None:
                cards[name] = card
        return cards

    async def knows(self, name: str) -> bool:
        """Return whether a model or an alias has the name, even while its workers are away."""
        try:
            served = {card.name for card in await self.cards()}
        except ServiceError:
            served = set()
        return self._model(name, self._seen.keys() | served) is not None

    async def card(self, name: str) -> ModelCard:
        """Return the card of the live model with this name or alias; "" names the only one. Raises
        ServiceError MODEL_NOT_FOUND, UNAVAILABLE, INVALID_ARGUMENT."""
        cards = await self.cards()
        card = self._resolved(name, cards)
        if all(card.name != live.name for live in cards):
            raise _unknown(name) if cards else _no_model_served()
        return card

    def loaded(self, card: ModelCard) -> LoadedTokenizer | None:
        """Return what was loaded from the model's files, or None if it is not loaded now."""
        load = self._loads.get(_key(card))
        if load is None or not load.done() or load.cancelled() or load.exception() is not None:
            return None
        return load.result()

    async def get(self, name: str) -> ServedModel:
        """Return the model with this name or alias; "" names the only one.

        Finds a model even while all its workers are away: the router decides whether a request for
        it waits. Raises ServiceError MODEL_NOT_FOUND, UNAVAILABLE, INVALID_ARGUMENT.
        """
        try:
            cards = await self.cards()
        except ServiceError:
            model = self._model(name, self._seen)
            if not model:
                raise
            card = self._seen[model]
        else:
            card = self._resolved(name, cards)
        text = await self._text(card)
        preparation = Preparation(
            card,
            text.vocabulary,
            text.defaults,
            self._parsers,
            text.tool_parser,
            text.reasoning_parser,
            self._strict_max_tokens,
            self._overrides.max_new_tokens,
        )
        return ServedModel(card, text, preparation)

    def _model(self, name: str, names: Collection[str]) -> str | None:
        """Return the model of the name or alias; "" is the only model, None is an unknown one."""
        if not name or name in names:
            return name
        model = self._aliases.get(name)
        return model if model == "" or model in names else None

    def _resolved(self, name: str, cards: Sequence[ModelCard]) -> ModelCard:
        """Return the card of the model that a name means, from the live `cards` and those seen
        earlier. The only model is always a live one. Raises ServiceError."""
        models = {**self._seen, **{card.name: card for card in cards}}
        model = self._model(name, models)
        if model:
            return models[model]
        if not cards:
            raise _no_model_served()
        if model is None and not self._any_model:
            raise _unknown(name)
        if len(cards) > 1:
            names = ", ".join(sorted(card.name for card in cards))
            raise ServiceError(
                INVALID_ARGUMENT, f"model must be one of the served models: {names}", param="model"
            )
        return cards[0]

    def has_template(self, card: ModelCard) -> bool:
        """Return whether chats have a template: the model's or the operator's."""
        return bool(card.template_digest) or self._overrides.template is not None

    async def template(self, card: ModelCard) -> str:
        """Return the chat template of the model or of the operator; empty if there is none. Raises
        ServiceError."""
        if self._overrides.template is not None:
            return self._overrides.template.decode()
        digest = card.template_digest
        return (await self._upstream.blob(digest)).decode(errors="replace") if digest else ""

    async def ready(self, cards: Sequence[ModelCard], wait_s: float) -> list[str]:
        """Load what requests for these models need, so that no request waits for a load.

        Returns the names of models that are loaded, or whose files cannot be loaded: requests for
        those get the error. Waits until the first load ends, at most `wait_s`. Models beyond
        MAX_LOADED are loaded by their first request, and count as loaded.
        """
        self._remember(cards)
        loads: dict[str, asyncio.Task[LoadedTokenizer]] = {}
        for card in cards:
            load = self._loads.get(_key(card))
            if load is not None and load.done() and not _is_final(load):
                del self._loads[_key(card)]
                load = None
            if load is None and len(self._loads) < MAX_LOADED:
                load = self._load(card)
            if load is not None:
                loads[card.name] = load
        if loads:
            await asyncio.wait(loads.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return [
            card.name
            for card in cards
            if card.name not in loads or (loads[card.name].done() and _is_final(loads[card.name]))
        ]

    async def _text(self, card: ModelCard) -> LoadedTokenizer:
        """Return what is loaded from the model's files. Retries a failed load, after REFUSED_S if
        its files are the reason, and a load whose processes have died."""
        if refused := self._refused.get(_key(card)):
            reason, since = refused
            remaining_s = since + REFUSED_S - asyncio.get_running_loop().time()
            if remaining_s > 0:
                raise ServiceError(UNAVAILABLE, reason, retry_after_s=remaining_s)
        load = self._load(card)
        if load.done() and (
            load.cancelled() or load.exception() is not None or not load.result().workers.alive
        ):
            self._drop(_key(card))
            load = self._load(card)
        return await asyncio.shield(load)  # other requests may wait for it too

    def _load(self, card: ModelCard) -> "asyncio.Task[LoadedTokenizer]":
        """Return the one load of these files, which the first call starts. The dict is ordered by
        last use; a running load is never dropped."""
        key = _key(card)
        load = self._loads.pop(key, None)
        if load is None:
            finished = [other for other, other_load in self._loads.items() if other_load.done()]
            for other in finished[: max(0, len(self._loads) + 1 - MAX_LOADED)]:
                self._drop(other)
            load = asyncio.create_task(self._fetch_and_build(card, key), name="load")
            load.add_done_callback(lambda load: self._log_failure(card.name, load))
        self._loads[key] = load
        return load

    def _drop(self, key: Key) -> None:
        """Forget a load and end its processes, if it has any."""
        self._refused.pop(key, None)
        closing = asyncio.create_task(_close(self._loads.pop(key)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _log_failure(self, name: str, load: "asyncio.Task[LoadedTokenizer]") -> None:
        """Log a failure once, however often the load is retried."""
        error = None if load.cancelled() else load.exception()
        failure = "" if error is None else str(error)
        if failure and self._failures.get(name) != failure:
            log.warning("model %r: the tokenizer could not be loaded: %s", name, failure)
        self._failures[name] = failure
        while len(self._failures) > MAX_LOADED:
            del self._failures[next(iter(self._failures))]

    async def _fetch_and_build(self, card: ModelCard, key: Key) -> LoadedTokenizer:
        files = {
            name: await self._upstream.blob(digest) if digest else b""
            for name, digest in zip(("tokenizer", "template", "generation"), key, strict=True)
        }
        if self._overrides.template is not None:
            files["template"] = self._overrides.template
        model_info = TextModelInfo(
            vocab_size=card.vocab_size,
            eos_ids=tuple(card.eos_ids),
            bos_id=card.bos_id if card.has_bos else None,
            adds_bos=card.adds_bos,
        )
        try:
            text = await self._text_pool.load(model_info, files)
        except UnsupportedTokenizer as error:
            reason = f"the model cannot be served: {error}"
            self._refused[key] = reason, asyncio.get_running_loop().time()
            raise ServiceError(UNAVAILABLE, reason) from error
        if text.tool_parser == FALLBACK_PARSER:
            log.warning(
                "model %r: its chat template shows tools in an unknown format; its tool calls are "
                "parsed as JSON at the beginning of an answer (--tool-parser sets another format)",
                card.name,
            )
        return text._replace(defaults=self._overrides.defaults(text.defaults))

    async def close(self) -> None:
        """End the tokenizer workers."""
        closing = [_close(load) for load in self._loads.values()]
        await asyncio.gather(*closing, *self._closing, self._text_pool.close())


def _alias(text: str) -> tuple[str, str]:
    """Split an alias into its name and its model's name; "" means the only served model."""
    name, _, model = text.partition("=")
    return name, model


async def _close(load: "asyncio.Task[LoadedTokenizer]") -> None:
    load.cancel()
    await asyncio.wait([load])
    if not load.cancelled() and load.exception() is None:
        await load.result().workers.close()


def _key(card: ModelCard) -> Key:
    return card.tokenizer_digest, card.template_digest, card.generation_config_digest


def _is_final(load: "asyncio.Task[LoadedTokenizer]") -> bool:
    """Return whether a retry would end the same way, because no network error was in the way."""
    if load.cancelled():
        return False
    error = load.exception()
    return error is None or isinstance(error.__cause__, UnsupportedTokenizer)


def _unknown(name: str) -> ServiceError:
    return ServiceError(MODEL_NOT_FOUND, f"the model {quoted(name)} does not exist", param="model")


def _no_model_served() -> ServiceError:
    return ServiceError(UNAVAILABLE, "no model is served yet", retry_after_s=1.0)
