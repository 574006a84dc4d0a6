"""Turns the token ids of one choice into text, up to the token or stop string that ends it; pure.

Invariant: the update with `finish` is the last one.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdserve.gateway.text.detokenizer import IncrementalDetokenizer
from pdserve.gateway.text.stop import StopMatcher


class TextUpdate(NamedTuple):
    """New text of a choice, and its finish reason: "stop", "length", or None while it runs.

    `offsets` has one entry per counted token: the number of characters of the choice before it.
    Tokens after the one that completes a stop string are not counted. `stop` is that stop string.
    """

    text: str
    offsets: tuple[int, ...]
    finish: str | None
    stop: str | None = None


class ChoiceText:
    """Combines a detokenizer with stop string matching.

    `stop_ids`: the eos and stop tokens. The text of one that ends the choice is omitted unless
    `include_stop` is set. A choice that a grammar ends has no such token.
    `offset`: number of characters before the first token, e.g. of an echoed prompt.
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
        self._has_stops = stops.active
        self._hidden_ids = frozenset(() if include_stop else stop_ids)
        self._offset = offset

    def push_text(self, id_: int) -> str | None:
        """Return the text of one token that does not end the choice; may be empty. Returns None and
        does not consume the token if the choice has stop strings."""
        if self._has_stops:
            return None
        text = self._detokenizer.push((id_,))
        self._offset += len(text)
        return text

    def push(self, ids: Sequence[int], finish: str | None) -> TextUpdate:
        """Add tokens and return the new text.

        `finish`: how the engine ended the choice with the last token: "stop" (eos token, stop
        token or end of a grammar), "length", or None if the choice continues.
        """
        if finish is None and len(ids) == 1 and not self._has_stops:  # the common case
            text, offset = self._detokenizer.push(ids), self._offset
            self._offset += len(text)
            return TextUpdate(text, (offset,), None)
        pieces: list[str] = []
        offsets: list[int] = []
        for position, token in enumerate(ids):
            ends = finish == "stop" and position == len(ids) - 1
            text = "" if ends and token in self._hidden_ids else self._detokenizer.push([token])
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
