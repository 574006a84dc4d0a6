"""Converts the token ids of one choice to text while they arrive, up to the token or stop string
that ends the choice; pure.

Invariants: text is emitted exactly once and in order. The text held back is exactly the longest
ending that may still become a stop string. The update with `finish` set is the last one.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdserve.text.tokenizer.detokenizer import IncrementalDetokenizer


class Emitted(NamedTuple):
    """The text that the stop string matcher releases after a token.

    `stop` is the stop string that ended the text, or None. `num_tokens` is the number of tokens so
    far; after a stop, of those up to and including the token that completed the stop string.
    """

    text: str
    stop: str | None
    num_tokens: int


class _Pattern:
    """The matcher of one stop string, a Knuth-Morris-Pratt automaton; `matched` is the number of
    its characters that the text ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # length of the longest border of text[: i + 1]
        border = 0
        for i in range(1, len(text)):
            while border and text[i] != text[border]:
                border = self._fallback[border - 1]
            border += text[i] == text[border]
            self._fallback[i] = border

    def advance(self, char: str) -> bool:
        """Add the next character of the text; return whether it completes the stop string."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)

    @property
    def held(self) -> int:
        """Number of characters at the end of the text that may be the beginning of the stop
        string."""
        return self._fallback[-1] if self.matched == len(self.text) else self.matched


class StopMatcher:
    """Finds the stop strings of one choice in its text.

    The stop string that is complete first ends the text; of several completed by the same
    character, the longest. The result depends only on the text and not on its split into tokens,
    except that a stop string which one of the first `min_tokens` tokens completes is ignored.
    """

    def __init__(
        self, stops: Sequence[str], *, include_stop_str: bool = False, min_tokens: int = 0
    ) -> None:
        """`stops`: the stop strings. `include_stop_str`: keep the stop string in the text. Raises
        ValueError if a stop string is empty."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._include = include_stop_str
        self._min_tokens = min_tokens
        self._pending = ""
        self._num_tokens = 0
        self._stop: str | None = None

    @property
    def active(self) -> bool:
        """Whether the choice has stop strings; if not, `push` returns each text unchanged."""
        return bool(self._patterns)

    def push(self, text: str) -> Emitted:
        """Add the text of one token, which may be empty; return the text that can be released.
        After a stop string, nothing more is released."""
        if self._stop is None:
            self._num_tokens += 1
        return self._take(text)

    def flush(self, text: str = "") -> Emitted:
        """End the text: add remaining text that belongs to no new token, and release all text held
        back."""
        emitted = self._take(text)
        rest, self._pending = self._pending, ""
        return Emitted(emitted.text + rest, emitted.stop, emitted.num_tokens)

    def _take(self, text: str) -> Emitted:
        if self._stop is not None:
            return Emitted("", self._stop, self._num_tokens)
        if not self._patterns:
            return Emitted(text, None, self._num_tokens)
        start = len(self._pending)
        pending = self._pending + text
        for end, char in enumerate(text, start + 1):
            completed = [p.text for p in self._patterns if p.advance(char)]
            if completed and self._num_tokens > self._min_tokens:
                self._stop = max(completed, key=len)
                self._pending = ""
                cut = end if self._include else end - len(self._stop)
                return Emitted(pending[:cut], self._stop, self._num_tokens)
        cut = len(pending) - max(p.held for p in self._patterns)
        self._pending = pending[cut:]
        return Emitted(pending[:cut], None, self._num_tokens)


class TextUpdate(NamedTuple):
    """New text of a choice, and its finish reason: "stop", "length", or None while it continues.

    `offsets` has an entry per new token: the number of the choice's characters before the token.
    Tokens after the one that completes a stop string have none. `stop` is that stop string, or
    None.
    """

    text: str
    offsets: tuple[int, ...]
    finish: str | None
    stop: str | None = None


class ChoiceText:
    """Converts the token ids of one choice to text, and ends the text at a stop string.

    `stop_ids`: ids of the eos and stop tokens. The text of such a token is omitted where it ends
    the choice, unless `include_stop` is set. `offset`: number of characters before the first token,
    e.g. of an echoed prompt.
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
        """Add one token that does not end the choice and return its text, which may be empty. If
        the choice has stop strings, return None instead and do not add the token: use `push`."""
        if self._has_stops:
            return None
        text = self._detokenizer.push((id_,))
        self._offset += len(text)
        return text

    def push(self, ids: Sequence[int], finish: str | None) -> TextUpdate:
        """Add tokens and return the new text.

        `finish`: the reason for which the engine ended the choice with the last of the tokens:
        "stop" (eos token, stop token or end of a grammar), "length", or None if the choice
        continues.
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
