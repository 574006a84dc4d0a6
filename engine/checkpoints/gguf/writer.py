"""Writes a quantized copy of a GGUF model of any architecture. Matrices with known names (ROLES in
mapping.py) are quantized; all other tensors are copied."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.gguf.mapping import tensor_role
from pdserve.engine.checkpoints.gguf.reader import Place, merge, raw_tensor, read_shards
from pdserve.engine.checkpoints.source import CheckpointError, Layout
from pdserve.engine.weights import (
    BLOCKS,
    PIECE_VALUES,
    TYPES,
    Mix,
    RawTensor,
    StoredMatrix,
    quantize_into,
    quantized_bytes,
    quantized_empty,
    row_runs,
)

# Keys that are not copied: those that the writer sets, and those of the split.
SKIPPED_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")
SKIPPED_PREFIXES = ("GGUF.", "split.")
VERSION = 2  # general.quantization_version: version of GGML's block formats
MIXES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # type -> llama.cpp's name


def quantize_gguf(
    source: Path, target: Path, type: str, progress: Callable[[float], None]
) -> Counter[str]:
    """Write a quantized copy of a GGUF model to the file `target` and return its number of tensors
    by format.

    `type` is one of TYPES. Matrices of plain numbers are quantized; vectors, routers and tensors
    that are quantized already are copied. `progress` gets the completed fraction. Raises
    CheckpointError if the source is unreadable or holds nothing to quantize, FileExistsError if the
    target exists, OSError if it cannot be written. After an error, no file remains.
    """
    readers = read_shards(source)
    metadata, stored = readers[0].metadata, merge(readers)
    if not isinstance(metadata.get("general.architecture"), str):
        raise CheckpointError(f"{source}: metadata key general.architecture is missing")
    layouts = {name: Layout(info.format, info.shape) for name, (_, info) in stored.items()}
    formats = new_formats(type, metadata, layouts)
    if not formats:
        present = ", ".join(sorted({info.format for _, info in stored.values()}))
        raise CheckpointError(f"{source}: there is nothing to quantize ({present})")
    if target.exists():
        raise FileExistsError(errno.EEXIST, "the output file already exists", str(target))
    part = target.with_name(f".{target.name}.part")
    try:
        counts = _write(readers[0].path, part, type, stored, formats, progress)
        os.rename(part, target)
    finally:
        part.unlink(missing_ok=True)
    return counts


def new_formats(
    type: str, metadata: Mapping[str, Any], stored: Mapping[str, Layout]
) -> dict[str, str]:
    """Return GGUF tensor name -> new format, for each stored tensor that quantization to `type`
    changes."""
    is_tied = "output.weight" not in stored
    with_roles = ((name, layout, tensor_role(name, is_tied)) for name, layout in stored.items())
    matrices = (
        StoredMatrix(name, *role, layout.format, layout.shape[-1])
        for name, layout, role in with_roles
        if role and len(layout.shape) > 1 and 0 not in layout.shape
    )
    return _mix(type, metadata).plan(matrices).formats


def _mix(type: str, metadata: Mapping[str, Any]) -> Mix:
    def number(key: str) -> int:
        """Return a number of the architecture's metadata; 0 if it is missing or differs between
        layers."""
        value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
        return value if isinstance(value, int) and value > 0 else 0

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    n_gqa = heads // kv_heads if kv_heads else 1
    return Mix(type, number("block_count"), n_gqa, number("expert_count"))


def _write(
    first: Path,
    target: Path,
    type: str,
    stored: dict[str, Place],
    formats: dict[str, str],
    progress: Callable[[float], None],
) -> Counter[str]:
    import gguf  # slow to import, and used only here

    fields = gguf.GGUFReader(first).fields
    writer = gguf.GGUFWriter(target, fields["general.architecture"].contents())
    for key, field in fields.items():
        if key not in SKIPPED_KEYS and not key.startswith(SKIPPED_PREFIXES):
            content, (kind, *item) = field.contents(), field.types
            if not item or content:  # the package cannot write empty arrays
                writer.add_key_value(key, content, kind, item[-1] if item else None)
    main = TYPES[type]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{MIXES.get(main, main)}"])
    writer.add_quantization_version(VERSION)
    if "general.alignment" in fields:
        writer.data_alignment = fields["general.alignment"].contents()
    counts: Counter[str] = Counter()
    for name, (_, info) in stored.items():
        format = formats.get(name, info.format)
        counts[format] += 1
        size = quantized_bytes(info.shape, format) if name in formats else info.num_bytes
        code = gguf.GGMLQuantizationType[format]
        writer.add_tensor_info(name, info.shape, np.dtype(np.float32), size, code)
    total, done = sum(info.num_bytes for _, info in stored.values()), 0
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for name, (file, info) in stored.items():
                if name in formats:
                    content = _quantized(raw_tensor(file, info, name), formats[name], name, pool)
                else:
                    content = file.array(np.dtype(np.uint8), (info.num_bytes,), info.start)
                writer.write_tensor_data(content)
                file.release(info.start, info.num_bytes)
                done += info.num_bytes
                progress(done / total)
    finally:
        writer.close()
    return counts


def _quantized(
    raw: RawTensor, format: str, name: str, pool: ThreadPoolExecutor
) -> NDArray[np.uint8]:
    """Return a tensor's quantized blocks, computed by all threads of the pool. Raises
    CheckpointError if its values cannot be quantized."""
    out = quantized_empty(raw.shape, format)
    pieces = row_runs(raw.shape, PIECE_VALUES)
    try:
        list(pool.map(lambda rows: quantize_into(raw.rows(rows), out.rows(rows)), pieces))
    except ValueError as error:
        raise CheckpointError(f"tensor {name}: {error}") from error
    blocks: NDArray[np.uint8] = out.parts[BLOCKS]
    return blocks
