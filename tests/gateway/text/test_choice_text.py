"""Which token's text is left out where a choice ends."""

from pathlib import Path

import pytest
from tiny_models import write_tokenizer

from pdserve.gateway.text.choice_text import ChoiceText
from pdserve.gateway.text.stop import StopMatcher
from pdserve.gateway.text.tokenizer import Tokenizer
from pdserve.gateway.text.vocabulary import TextCard

A, B, EOS = 64, 65, 258


@pytest.mark.parametrize(
    ("ids", "finish", "stop_ids", "include", "text"),
    [
        ([A, B], "stop", {EOS}, False, "ab"),  # a grammar has ended it
        ([A, B], "stop", {EOS, B}, False, "a"),
        ([A, B], "stop", {EOS, B}, True, "ab"),
        ([A, EOS], "stop", {EOS}, False, "a"),
        ([B, A], "stop", {B}, False, "ba"),
        ([A, B], "length", {B}, False, "ab"),
    ],
)
def test_only_a_stop_token_is_left_out(
    tmp_path: Path, ids: list[int], finish: str, stop_ids: set[int], include: bool, text: str
) -> None:
    write_tokenizer(tmp_path)
    card = TextCard(259, (EOS,))
    tokenizer = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), card)
    choice = ChoiceText(
        tokenizer.incremental(continues=True),
        StopMatcher(()),
        stop_ids=stop_ids,
        include_stop=include,
    )
    update = choice.push(ids, finish)
    assert (update.text, update.finish, len(update.offsets)) == (text, finish, 2)
