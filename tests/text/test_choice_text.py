"""Which token's text is left out at the end of a choice."""

from pathlib import Path
from random import Random

import pytest
from builders.byte_tokenizer import write_tokenizer

from pdserve.text.tokenizer import ChoiceText, StopMatcher, TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer

A, B, EOS = 64, 65, 258


@pytest.mark.parametrize(
    ("ids", "finish", "stop_ids", "include", "text"),
    [
        ([A, B], "stop", {EOS}, False, "ab"),  # ended by a grammar
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
    model_info = TextModelInfo(259, (EOS,))
    tokenizer = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), model_info)
    choice = ChoiceText(
        tokenizer.incremental(continues=True),
        StopMatcher(()),
        stop_ids=stop_ids,
        include_stop=include,
    )
    update = choice.push(ids, finish)
    assert (update.text, update.finish, len(update.offsets)) == (text, finish, 2)


def test_text_alone_equals_the_text_of_push(tmp_path: Path) -> None:
    """Alternate both calls over bytes of split characters; stop strings rule out the shorter
    call."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), TextModelInfo(259, (EOS,)))
    rng, by_text, empty = Random(1), 0, 0
    for stops in ((), ("never said",)):
        for _ in range(100):
            both = [
                ChoiceText(
                    tokenizer.incremental(continues=True), StopMatcher(stops), stop_ids={EOS}
                )
                for _ in range(2)
            ]
            said = "".join(rng.choices("aé漢😀 ", k=10))
            for id_ in tokenizer.encode(said, add_special_tokens=False, parse_special=False):
                text = both[0].push_text(id_) if rng.random() < 0.5 else None
                assert text is None or not stops
                by_text += text is not None
                empty += text == ""
                update = both[1].push([id_], None)
                if text is None:
                    assert both[0].push([id_], None) == update  # including offsets
                else:
                    assert text == update.text
    assert by_text > 500
    assert empty > 50
