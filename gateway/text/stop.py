"""Finds stop strings in a stream of text, across token borders; pure.

Invariant: text is emitted exactly once and in order. The held text is exactly the longest suffix
that may still become a stop string.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Emitted(NamedTuple):
    """The text that one push releases.

    `stop` is the stop string that ended the text, or None. `num_tokens` counts the tokens pushed
    so far; once stopped, those up to and including the token that completed the stop string.
    """

    text: str
    stop: str | None
    num_tokens: int


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `matched` characters have matched."""

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
        """Take one character; True if it completes the stop string."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)

    @property
    def held(self) -> int:
        """Number of characters at the end of the text that may begin a match."""
        return self._fallback[-1] if self.matched == len(self.text) else self.matched


class StopMatcher:
    """Matches the stop strings of one choice.

    The stop string that is complete first ends the text; the longest wins if several complete at
    the same character. The result depends only on the text, not on its split into tokens, except
    that a stop string completed by one of the first `min_tokens` tokens is ignored.
    """

    def __init__(
        self, stops: Sequence[str], *, include_stop_str: bool = False, min_tokens: int = 0
    ) -> None:
        """Raises ValueError for an empty stop string."""
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
        """Whether there are stop strings; without them each push returns its text unchanged."""
        return bool(self._patterns)

    def push(self, text: str) -> Emitted:
        """Add the text of one token, which may be empty. Once stopped, emits nothing more."""
        if self._stop is None:
            self._num_tokens += 1
        return self._take(text)

    def flush(self, text: str = "") -> Emitted:
        """End the text: add text that belongs to no new token and release the held text."""
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
