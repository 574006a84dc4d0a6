"""Deltas join to the whole text, and no delta ends within a character."""

from itertools import pairwise

import pytest
import tokenizers
from builders.hard_strings import HARD_STRINGS
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text import UnsupportedTokenizer
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.detokenizer import TokenBytes
from pdserve.text.tokenizer.tokenizer import Tokenizer

cuts = st.lists(st.integers(0, 400), max_size=8)
# The model's vocabulary has no token for some bytes: control characters, and planes 4 to 11.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"
WORD_PIECES = ("a", "##b", "do", "##.", ".", "...", ",", "!", "?", "'", "'s", "n't", "-")
basic = st.characters(max_codepoint=0x3FFFF, exclude_characters=NO_TOKEN, exclude_categories=["Cs"])
words = st.one_of(st.sampled_from(HARD_STRINGS), st.text(basic, max_size=20))


def stream(tokenizer: Tokenizer, ids: list[int], at: list[int]) -> list[str]:
    detokenizer = tokenizer.incremental(skip_special_tokens=False)
    borders = sorted({0, *(cut for cut in at if cut < len(ids)), len(ids)})
    deltas = [detokenizer.push(ids[start:end]) for start, end in pairwise(borders)]
    return [*deltas, detokenizer.flush()]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


@given(words, cuts)
def test_text_survives_any_division(
    smollm: Tokenizer, spm: Tokenizer, text: str, at: list[int]
) -> None:
    for tokenizer in (smollm, spm):
        deltas = stream(tokenizer, encode(tokenizer, text), at)
        # SentencePiece's space marker decodes to a space.
        expected = text if tokenizer is smollm else text.replace("\u2581", " ")
        assert "".join(deltas) == expected


@given(st.lists(st.integers(0, 49151), max_size=40), cuts)
def test_any_ids_any_division(smollm: Tokenizer, ids: list[int], at: list[int]) -> None:
    deltas = stream(smollm, ids, at)
    assert "".join(deltas) == smollm.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(4, 259), max_size=30), cuts)
def test_any_bytes_any_division(spm: Tokenizer, ids: list[int], at: list[int]) -> None:
    data = bytes(token - 4 for token in ids)
    expected = data.decode("utf-8", "replace").removeprefix(" ")
    assert "".join(stream(spm, ids, at)) == expected
    assert spm.decode(ids) == expected


@given(words)
def test_characters_are_never_split(smollm: Tokenizer, text: str) -> None:
    detokenizer = smollm.incremental()
    seen = ""
    for token in encode(smollm, text):
        seen += detokenizer.push([token])
        assert text.startswith(seen)
    assert detokenizer.flush() == ""


def test_a_character_of_four_tokens_is_emitted_whole(smollm: Tokenizer) -> None:
    ids = encode(smollm, "𐍈")
    assert len(ids) == 4
    detokenizer = smollm.incremental()
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "𐍈"]


def test_invalid_bytes_are_replaced_when_certain(spm: Tokenizer) -> None:
    detokenizer = spm.incremental()
    assert detokenizer.push([4 + 0xE2]) == ""
    assert detokenizer.push([4 + 0x82]) == ""
    assert detokenizer.push([4 + 0xFF]) == "\ufffd\ufffd"
    assert detokenizer.push([4 + 0xF0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_long_run_of_invalid_bytes_is_not_held(spm: Tokenizer) -> None:
    detokenizer = spm.incremental()
    out = [detokenizer.push([4 + 0x80]) for _ in range(2000)]
    assert out == ["\ufffd"] * 2000


def test_a_leading_space_is_dropped_at_the_start_and_kept_after_a_prompt(spm: Tokenizer) -> None:
    ids = encode(spm, "hello world")
    assert spm.incremental().push(ids) == "hello world"
    assert spm.incremental(continues=True).push(ids) == " hello world"
    assert spm.decode([2, *ids]) == "hello world"


def test_special_tokens_are_skipped_or_shown(smollm: Tokenizer) -> None:
    ids = [1, *encode(smollm, "hi"), 2]
    assert smollm.decode(ids) == "hi"
    assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_equals_the_library_where_bytes_are_valid(smollm_json: bytes, smollm: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_buffer(smollm_json)
    for text in HARD_STRINGS:
        ids = encode(smollm, text)
        assert smollm.decode(ids) == library.decode(ids) == text


@given(st.lists(st.sampled_from(WORD_PIECES), max_size=20), cuts)
def test_word_pieces_join_as_in_the_library(pieces: list[str], at: list[int]) -> None:
    vocab = {piece: token for token, piece in enumerate(WORD_PIECES)}
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="a"))
    ids = [vocab[piece] for piece in ("a", *pieces)]
    for cleans in (True, False):
        library.decoder = tokenizers.decoders.WordPiece(cleanup=cleans)
        tokenizer = Tokenizer(library.to_str().encode(), TextModelInfo(len(vocab)))
        assert "".join(stream(tokenizer, ids, at)) == library.decode(ids)


def test_the_steps_of_a_decoder_are_bounded() -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 64}
    for num_steps in (16, 17, 150_000):
        decoder = {"type": "Sequence", "decoders": [step] * num_steps}
        if num_steps == 16:
            assert TokenBytes(lambda token: "a", decoder).bytes_of(0) == b"b" * 64
        else:
            with pytest.raises(UnsupportedTokenizer, match=f"{num_steps} steps"):
                TokenBytes(lambda token: "a", decoder)


def test_ids_without_a_token_have_no_text(smollm_json: bytes) -> None:
    padded = Tokenizer(smollm_json, TextModelInfo(vocab_size=50000))
    assert padded.decode([49999]) == ""
    assert padded.token_bytes(49999) == b""
