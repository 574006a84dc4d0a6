"""The GGUF container: what the reader returns, and what it must refuse."""

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.checkpoints.gguf.reader import GgufReader

STRING, ARRAY, U32, F32, BOOL = 8, 9, 4, 6, 7


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return head + struct.pack("<IQ", kind, offset)


def container(
    pairs: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    num_pairs: int | None = None,
    num_infos: int | None = None,
) -> bytes:
    num_pairs = len(pairs) if num_pairs is None else num_pairs
    num_infos = len(infos) if num_infos is None else num_infos
    head = b"GGUF" + struct.pack("<IQQ", version, num_infos, num_pairs)
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return path


ARCH = pair("general.architecture", STRING, text("llama"))


@pytest.mark.parametrize("version", [2, 3])
def test_reads_values_of_every_type(version: int, tmp_path: Path) -> None:
    pairs = [
        ARCH,
        pair("u8", 0, b"\xff"),
        pair("i8", 1, b"\xff"),
        pair("u16", 2, struct.pack("<H", 65535)),
        pair("i16", 3, struct.pack("<h", -2)),
        pair("u32", U32, struct.pack("<I", 7)),
        pair("i32", 5, struct.pack("<i", -7)),
        pair("f32", F32, struct.pack("<f", 0.5)),
        pair("bool", BOOL, b"\x01"),
        pair("u64", 10, struct.pack("<Q", 2**64 - 1)),
        pair("i64", 11, struct.pack("<q", -(2**63))),
        pair("f64", 12, struct.pack("<d", 0.1)),
        pair("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("") + text("ü")),
        pair("floats", ARRAY, struct.pack("<IQ2f", F32, 2, 1.5, -1)),
        pair("flags", ARRAY, struct.pack("<IQ", BOOL, 3) + b"\x01\x00\x01"),
        pair("none", ARRAY, struct.pack("<IQ", STRING, 0)),
    ]
    data = np.arange(8, dtype=np.float32).tobytes()
    infos = [info("t", [4, 2], 0, 0)]
    reader = GgufReader(write(tmp_path, container(pairs, infos, data, version=version)))
    found = dict(reader.metadata)
    assert found.pop("general.architecture") == "llama"
    assert found.pop("words") == ["a", "", "ü"]
    assert found.pop("none") == []
    assert list(found.pop("floats")) == [1.5, -1]
    assert list(found.pop("flags")) == [1, 0, 1]
    assert found == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 7,
        "i32": -7,
        "f32": 0.5,
        "bool": True,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
    }
    tensor = reader.tensors["t"]
    assert (tensor.format, tensor.shape, tensor.num_bytes) == ("F32", (2, 4), 32)
    assert reader.file.map[tensor.start : tensor.start + 32] == data


def test_alignment_given_in_the_file(tmp_path: Path) -> None:
    pairs = [ARCH, pair("general.alignment", U32, struct.pack("<I", 64))]
    data = container(pairs, [info("t", [4], 0, 64)], bytes(80), alignment=64)
    assert GgufReader(write(tmp_path, data)).tensors["t"].start % 64 == 0


F32X4 = info("t", [4], 0, 0)
BAD = {
    "does not begin": b"GGML" + bytes(100),
    "version 1;": container([ARCH], [], version=1),
    "big-endian": container([ARCH], [], version=3 << 24),
    "4611686018427387904 metadata keys": container([ARCH], [], num_pairs=2**62),
    "1000 tensors": container([ARCH], [], num_infos=1000),
    "metadata key 'general.architecture' occurs twice": container([ARCH, ARCH], []),
    "'t' occurs twice": container([ARCH], [F32X4, F32X4], bytes(32)),
    "bytes of text": container([text("k") + struct.pack("<IQ", STRING, 2**63)], []),
    "a name has 65536 bytes": container([pair("k" * 65536, 0, b"\0")], []),
    "not UTF-8": container([pair("k", STRING, struct.pack("<Q", 1) + b"\xff")], []),
    "array has a string that is not UTF-8": container(
        [pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 1) + b"\xff")], []
    ),
    "unknown type 13": container([pair("k", 13, bytes(8))], []),
    "array has unknown type 9": container([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []),
    "strings do not fit": container([pair("k", ARRAY, struct.pack("<IQ", STRING, 2**60))], []),
    "numbers do not fit": container([pair("k", ARRAY, struct.pack("<IQ", 12, 2**61))], []),
    "past the end": container(
        [pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63) + bytes(40))], []
    ),
    "0 dimensions": container([ARCH], [info("t", [], 0, 0)], bytes(32)),
    "5 dimensions": container([ARCH], [info("t", [1] * 5, 0, 0)], bytes(32)),
    "unknown type 4 ": container([ARCH], [info("t", [4], 4, 0)], bytes(32)),
    "has unknown type 99999": container([ARCH], [info("t", [4], 99999, 0)], bytes(32)),
    "cannot be F32": container([ARCH], [info("t", [0], 0, 0)], bytes(32)),
    r"\[48\] cannot be Q4_0": container([ARCH], [info("t", [48], 2, 0)], bytes(32)),
    "truncated": container([ARCH], [info("t", [9], 0, 0)], bytes(32)),
    # 2**32 * 2**32 values overflow to 0 in 64 bits
    "ends at byte": container([ARCH], [info("t", [2**32, 2**32], 0, 0)], bytes(32)),
    "has offset 4, not a multiple": container([ARCH], [info("t", [4], 0, 4)], bytes(32)),
    "'u' overlaps": container([ARCH], [info("t", [9], 0, 0), info("u", [4], 0, 32)], bytes(96)),
    "alignment is 0": container([pair("general.alignment", U32, bytes(4))], []),
    "alignment is 24": container([pair("general.alignment", U32, struct.pack("<I", 24))], []),
    "alignment is 'x'": container([pair("general.alignment", STRING, text("x"))], []),
}


def test_invalid_files_are_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for message in BAD:
        with subtests.test(message):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(CheckpointError, match=message):
                GgufReader(write(tmp_path, BAD[message]))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = container([ARCH, pair("n", U32, bytes(4))], [F32X4], bytes(16))
    GgufReader(write(tmp_path, whole))
    for size in range(len(whole)):
        with pytest.raises(CheckpointError):
            GgufReader(write(tmp_path, whole[:size]))


def test_missing_and_empty_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", write(tmp_path, b""), tmp_path):
        with pytest.raises(CheckpointError, match="cannot read"):
            GgufReader(path)


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(99)
    writer.add_token_list(["a", "b"])
    rng = np.random.default_rng(0)
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q8_0", "TQ2_0"):
        of = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal((3, 256), np.float32)
        writer.add_tensor(kind, gguf.quants.quantize(values, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader, reference = GgufReader(path), gguf.GGUFReader(path)
    assert reader.metadata["llama.context_length"] == 99
    assert reader.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert len(reference.tensors) == len(reader.tensors) == 6
    for tensor in reference.tensors:
        mine = reader.tensors[tensor.name]
        assert mine.start == tensor.data_offset
        assert mine.num_bytes == tensor.n_bytes
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.format == tensor.tensor_type.name


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    count = 150_000
    tokens = struct.pack("<IQ", STRING, count) + b"".join(text(f"tok{i}") for i in range(count))
    scores = struct.pack("<IQ", F32, count) + bytes(4 * count)
    pairs = [pair("tokens", ARRAY, tokens), pair("scores", ARRAY, scores)]
    path = write(tmp_path, container(pairs, []))
    before = time.process_time()
    reader = GgufReader(path)
    spent = time.process_time() - before
    assert len(reader.metadata["tokens"]) == len(reader.metadata["scores"]) == count
    assert spent < 1.0  # about 0.1 s on an idle machine; the gguf package needs 6.7 s
