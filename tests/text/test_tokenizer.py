"""Special tokens, bos, and limits; ids equal those of the tokenizers library."""

import gc
import json
import threading
import time
import tracemalloc

import pytest
import tokenizers
from builders.hard_strings import HARD_STRINGS
from builders.tiny_spm import spm_metadata, spm_tokenizer

from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.text import TextError, UnsupportedTokenizer
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import MAX_SPECIAL_CHARS, Rendered, Tokenizer

CHATML = "<|im_start|>user\nsay <|im_end|>\n<|im_start|>assistant\n"


def test_memory_is_linear_in_the_length_of_special_tokens(smollm_json: bytes) -> None:
    """Load 64 special tokens of the maximum length, without storing every prefix of each."""
    settings = json.loads(smollm_json)
    first = len(settings["model"]["vocab"])
    for number in range(64):
        content = f"<{number:0{MAX_SPECIAL_CHARS - 2}}>"
        token = {**settings["added_tokens"][0], "id": first + number, "content": content}
        settings["added_tokens"].append(token)
    data, model_info = json.dumps(settings).encode(), TextModelInfo(first + 64)
    Tokenizer(smollm_json, model_info)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tokenizer = Tokenizer(data, model_info)
        ids = tokenizer.encode(content, add_special_tokens=False, parse_special=True)
        kept = tracemalloc.get_traced_memory()[0] - before
        plain = tracemalloc.get_traced_memory()[0]
        second = Tokenizer(smollm_json, model_info)
        without = tracemalloc.get_traced_memory()[0] - plain
    finally:
        tracemalloc.stop()
    assert ids == [first + 63]
    assert second.special.ids != tokenizer.special.ids
    assert kept - without < 16 * 64 * MAX_SPECIAL_CHARS


def test_parsed_ids_equal_the_library(smollm_json: bytes, smollm: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_buffer(smollm_json)
    for text in [*HARD_STRINGS, CHATML, "<|im_end|>", "<|im_end|><|im_start|>", "a<|im_end|> b "]:
        ids = smollm.encode(text, add_special_tokens=True, parse_special=True)
        assert ids == library.encode(text).ids, text


def test_unparsed_special_tokens_are_text(smollm: Tokenizer) -> None:
    ids = smollm.encode(CHATML, add_special_tokens=False, parse_special=False)
    assert smollm.special.ids.isdisjoint(ids)
    assert smollm.decode(ids) == CHATML
    assert smollm.special.ids & set(
        smollm.encode(CHATML, add_special_tokens=False, parse_special=True)
    )


def test_no_text_becomes_a_special_token(smollm: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (smollm, spm):
        assert len(tokenizer.special.texts) > 3
        for text in tokenizer.special.texts:
            for around in ("{}", "a {} b", "{}{}", " {}"):
                quoted = around.format(text, text)
                ids = tokenizer.encode(quoted, add_special_tokens=False, parse_special=False)
                assert tokenizer.special.ids.isdisjoint(ids), quoted
                assert tokenizer.decode(ids).strip() == quoted.strip()


def test_merges_that_make_a_special_token_are_cut() -> None:
    document = {
        "added_tokens": [
            {
                "id": 3,
                "content": "<s>",
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
        ],
        "model": {
            "type": "BPE",
            "vocab": {"<": 0, "s": 1, ">": 2, "<s>": 3, "<s": 4},
            "merges": [["<", "s"], ["<s", ">"]],
        },
        "decoder": {"type": "Fuse"},
    }
    tokenizer = Tokenizer(json.dumps(document).encode(), TextModelInfo(5))
    assert tokenizer.encode("<s>", add_special_tokens=False, parse_special=True) == [3]
    assert tokenizer.encode("s<s>", add_special_tokens=False, parse_special=False) == [1, 0, 1, 2]


def test_bos_is_added_once(spm: Tokenizer) -> None:
    assert spm.encode("hello", add_special_tokens=True, parse_special=False)[0] == 1
    for parse, count in ((True, 1), (False, 1)):
        ids = spm.encode("<s>hello", add_special_tokens=True, parse_special=parse)
        assert ids.count(1) == count
        assert ids[0] == 1
    rendered = Rendered("<s>[INST] hello", "<s>[INST] hello")
    assert spm.encode_rendered(rendered, add_special_tokens=True).count(1) == 1
    assert spm.encode_rendered(rendered)[:2] == [1, 3]
    assert spm.encode("hello", add_special_tokens=False, parse_special=False).count(1) == 0


def test_the_bos_of_the_model_is_added_if_the_file_adds_none(smollm_json: bytes) -> None:
    tokenizer = Tokenizer(smollm_json, TextModelInfo(49152, bos_id=1, adds_bos=True))
    assert tokenizer.encode("", add_special_tokens=True, parse_special=False) == [1]
    assert tokenizer.encode("a", add_special_tokens=True, parse_special=False)[0] == 1


def test_a_continued_text_gets_no_leading_space(smollm: Tokenizer, spm: Tokenizer) -> None:
    for words in (smollm, spm):
        for text in ("hello", " hello", "hello <s> world", "é"):
            ids = words.encode_within(text)
            assert words.incremental(skip_special_tokens=False, continues=True).push(ids) == text
    assert spm.encode_within("a<s>") == [*spm.encode_within("a"), spm.model_info.bos_id]
    assert spm.encode_within("hello") != spm.encode(
        "hello", add_special_tokens=False, parse_special=True
    )


def test_a_space_is_put_before_every_text() -> None:
    """Prepend it as llama.cpp does for GGUF, but not where a text continues after ordinary text."""
    tokenizer = spm_tokenizer()

    def names(text: str, parse_special: bool) -> list[str | None]:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        return [tokenizer.token_name(token) for token in ids]

    assert names("hello[INST]hello", True) == ["▁hello", "[INST]", "▁hello"]
    assert names(" hello", True) == ["▁", "▁hello"]
    apart = names("hello[INST]hello", False)
    assert "[INST]" not in apart
    assert "".join(map(str, apart)) == "▁hello[INST]hello"
    bare = spm_tokenizer(**{"tokenizer.ggml.add_space_prefix": False})
    ids = bare.encode("hello", add_special_tokens=False, parse_special=False)
    assert [bare.token_name(token) for token in ids] == ["hello"]


def test_a_normalizer_with_a_prepended_space_and_other_steps() -> None:
    """Drop only the space where a text continues, and apply all other steps."""
    pieces = {"▁": 0, "a": 1, "b": 2, "x": 3, "[": 4, "]": 5, "[x]": 6, "▁a": 7}
    merges = [("▁", "a"), ("[", "x")]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({**pieces, "[x": 8}, [*merges, ("[x", "]")])
    )
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Lowercase()]
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("b", "isolated")
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens([tokenizers.AddedToken("[x]", special=True)])
    tokenizer = Tokenizer(library.to_str().encode(), TextModelInfo(9))

    def names(parse_special: bool) -> list[str | None]:
        ids = tokenizer.encode("A[x]AB", add_special_tokens=False, parse_special=parse_special)
        return [tokenizer.token_name(token) for token in ids]

    assert names(True) == ["▁a", "[x]", "▁a", "b"]
    assert "[x]" not in names(False)
    assert "".join(map(str, names(False))) == "▁a[x]ab"


def test_stripping_special_tokens_remove_adjacent_spaces() -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, " ": 1, "b": 2}, []))
    library.decoder = tokenizers.decoders.Fuse()
    strip = tokenizers.AddedToken("<sep>", lstrip=True, rstrip=True, special=True)
    library.add_special_tokens([strip])
    tokenizer = Tokenizer(library.to_str().encode(), TextModelInfo(4))
    for text in ("a <sep> b", "  <sep>  ", "<sep><sep> a", " a <sep>b"):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert ids == library.encode(text).ids, text
    assert tokenizer.encode("a <sep> b", add_special_tokens=False, parse_special=True) == [0, 3, 2]


def test_ids_outside_the_vocabulary_are_refused(smollm: Tokenizer) -> None:
    smollm.check_ids([0, 49151])
    for wrong in (-1, 49152, 1 << 40):
        with pytest.raises(TextError, match=rf"{wrong} is outside the vocabulary of 49152"):
            smollm.check_ids([5, wrong])
        with pytest.raises(TextError):
            smollm.decode([wrong])


def test_lone_surrogates_are_refused(smollm: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate"):
        smollm.encode("a\ud83d", add_special_tokens=False, parse_special=False)


def test_other_threads_run_while_a_long_text_is_encoded(smollm: Tokenizer) -> None:
    text = "The quick brown fox, 12345.\n" * 30_000
    encoding = threading.Thread(
        target=lambda: smollm.encode(text, add_special_tokens=False, parse_special=False)
    )
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.005)
        turns += 1
    assert turns > 10


def test_text_and_bytes_of_single_tokens(smollm: Tokenizer, spm: Tokenizer) -> None:
    ids = smollm.encode(" 日本", add_special_tokens=False, parse_special=False)
    assert b"".join(smollm.token_bytes(token) for token in ids) == " 日本".encode()
    assert "\ufffd" in "".join(smollm.token_text(token) for token in ids)
    assert smollm.token_text(2) == "<|im_end|>"
    world = spm.encode("world", add_special_tokens=False, parse_special=False)
    assert [spm.token_text(token) for token in world] == [" world"]
    assert spm.token_bytes(4 + 0xE2) == b"\xe2"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "tokenizer.json"),
        (b"{}", "tokenizer.json"),
        (b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}', "no decoder"),
        (
            b'{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"decoder":{"type":"CTC",'
            b'"pad_token":"<pad>","word_delimiter_token":"|","cleanup":true}}',
            "CTC",
        ),
    ],
)
def test_unusable_files_are_explained(data: bytes, reason: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=reason):
        Tokenizer(data, TextModelInfo(1))


@pytest.mark.parametrize("apart", [False, True])
def test_many_added_tokens_load_quickly(apart: bool) -> None:
    """Load 5,000 tokens, like the reserved tokens of real models; `apart`: of two kinds, one after
    the other. The tokenizer for continued text has them all, with their ids."""
    data = json.loads(tokenizer_json(spm_metadata()))
    first = len(data["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] += [
        {"id": first + n, "content": f"<reserved_{n}>", "special": not apart or n < 2500, **flags}
        for n in range(5000)
    ]
    content, model_info = json.dumps(data).encode(), TextModelInfo(first + 5000)
    gc.collect()  # or the collection would be part of the measured time
    began = time.thread_time()
    made = Tokenizer(content, model_info)
    assert time.thread_time() - began < 1
    for n in (0, 2499, 2500, 4999):
        text = f"hello<s><reserved_{n}>hello"
        ids = made.encode(text, add_special_tokens=False, parse_special=True)
        assert first + n in ids
