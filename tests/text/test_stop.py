"""Stop strings, compared with a search of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.tokenizer import StopMatcher
from pdserve.text.tokenizer.choice_text import Emitted

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that is complete first; the longest if there are several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return end, max(done, key=len)
    return None


def run(matcher: StopMatcher, tokens: list[str]) -> tuple[list[str], Emitted]:
    texts = []
    for token in tokens:
        emitted = matcher.push(token)
        texts.append(emitted.text)
        if emitted.stop is not None:
            return texts, emitted
    last = matcher.flush()
    return [*texts, last.text], last


@given(st.lists(st.text("ab", max_size=4), max_size=12), stop_lists, st.booleans())
def test_equals_a_search_of_the_whole_text(
    tokens: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(tokens)
    texts, last = run(StopMatcher(stops, include_stop_str=include), tokens)
    expected = first_stop(text, stops)
    if expected is None:
        assert last == Emitted(texts[-1], None, len(tokens))
        assert "".join(texts) == text
        return
    end, stop = expected
    assert last.stop == stop
    assert "".join(texts) == text[: end if include else end - len(stop)]
    lengths = [len("".join(tokens[:n])) for n in range(len(tokens) + 1)]
    assert last.num_tokens == next(n for n, length in enumerate(lengths) if length >= end)


@given(letters, stop_lists)
def test_only_a_possible_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for end, char in enumerate(text, 1):
        step = matcher.push(char)
        emitted += step.text
        if step.stop is not None:
            return
        held = text[len(emitted) : end]
        prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
        longest = max((n for n in range(1, end + 1) if text[end - n : end] in prefixes), default=0)
        assert len(held) == longest


def test_a_stop_across_three_tokens_counts_the_completing_one() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("say S") == Emitted("say ", None, 1)
    assert matcher.push("") == Emitted("", None, 2)
    assert matcher.push("TO") == Emitted("", None, 3)
    assert matcher.push("P and more") == Emitted("", "STOP", 4)
    assert matcher.push("late") == Emitted("", "STOP", 4)
    assert matcher.flush() == Emitted("", "STOP", 4)


def test_a_false_alarm_is_released() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("a\n\nUs").text == "a"
    assert matcher.push("ual").text == "\n\nUsual"


def test_stop_within_the_flushed_text() -> None:
    matcher = StopMatcher(["\ufffd"], include_stop_str=True)
    assert matcher.push("a").text == "a"
    assert matcher.flush("\ufffd") == Emitted("\ufffd", "\ufffd", 1)


def test_min_tokens_ignores_early_stops() -> None:
    matcher = StopMatcher(["aa"], min_tokens=2)
    texts, last = run(matcher, ["aa", "a", "b", "a", "ab"])
    assert "".join(texts) == "aaab"
    assert last == Emitted("", "aa", 5)


def test_min_tokens_counts_a_match_completed_later() -> None:
    _, last = run(StopMatcher(["abab"], min_tokens=2), ["ab", "ab", "ab"])
    assert last == Emitted("", "abab", 3)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
