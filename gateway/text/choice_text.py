"""The text of one choice, from its token ids, up to the token or stop string that ends it; pure.

Nothing comes after the update that carries `finish`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdserve.gateway.text.detokenizer import IncrementalDetokenizer
from pdserve.gateway.text.stop import StopMatcher


class TextUpdate(NamedTuple):
    """New text, and how the choice has ended: "stop", "length", or None while it goes on.

    `offsets` has one entry for each token that counts: the characters of the choice before it.
    Tokens after the one that completed a stop string do not count. `stop` is that stop string.
    """

    text: str
    offsets: tuple[int, ...]
    finish: str | None
    stop: str | None = None


class ChoiceText:
    """Joins a detokenizer and stop strings.

    `stop_ids`: the eos and stop tokens, whose text is left out where they end a choice, unless
    `include_stop`; a choice that a grammar ends has none. `offset`: characters that stand before
    the first token's, e.g. an echoed prompt.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: StopMatcher,
        *,
        stop_ids: Collection[int],
        include_stop: bool = False,
        offset: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._left_out = frozenset(() if include_stop else stop_ids)
        self._offset = offset

    def push_text(self, id_: int) -> str | None:
        """The text of one token that ends nothing, may be empty. None, and the token is not taken,
        while a stop string could end the choice."""
        if self._stops.active:
            return None
        text = self._detokenizer.push((id_,))
        self._offset += len(text)
        return text

    def push(self, ids: Sequence[int], finish: str | None) -> TextUpdate:
        """The next tokens. `finish` says how the engine ended the choice with the last of them:
        "stop" by an eos or stop token or where a grammar ends, "length", or None if it has not."""
        if finish is None and len(ids) == 1 and not self._stops.active:  # as nearly always
            text, offset = self._detokenizer.push(ids), self._offset
            self._offset += len(text)
            return TextUpdate(text, (offset,), None)
        pieces: list[str] = []
        offsets: list[int] = []
        for position, token in enumerate(ids):
            ends = finish == "stop" and position == len(ids) - 1
            text = "" if ends and token in self._left_out else self._detokenizer.push([token])
            offsets.append(self._offset)
            self._offset += len(text)
            emitted = self._stops.push(text)
            pieces.append(emitted.text)
            if emitted.stop is not None:
                return TextUpdate("".join(pieces), tuple(offsets), "stop", emitted.stop)
        stop = None
        if finish is not None:
            rest = self._stops.flush(self._detokenizer.flush())
            pieces.append(rest.text)
            stop = rest.stop
            finish = "stop" if stop is not None else finish
        return TextUpdate("".join(pieces), tuple(offsets), finish, stop)
