"""From an engine's options to a decoder with its weights, and the card that describes it."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.checkpoints.digest import DigestCache
from pdserve.engine.checkpoints.gguf.checkpoint import GgufCheckpoint
from pdserve.engine.checkpoints.gguf.mapping import GgufMapping
from pdserve.engine.checkpoints.hf.checkpoint import DirectoryCheckpoint
from pdserve.engine.checkpoints.label import quantization_label
from pdserve.engine.checkpoints.resolve import Resolved, resolve
from pdserve.engine.checkpoints.source import Checkpoint, CheckpointError, TextFiles
from pdserve.engine.checkpoints.weight_loader import WeightLoader, check_names
from pdserve.engine.models.build import tensor_shapes
from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.identity import configuration_digest
from pdserve.engine.models.native import NativeDecoder
from pdserve.engine.models.spec import known_specs, parse_config
from pdserve.kernels.cpu import KV_BLOCK, CpuKernels
from pdserve.kernels.cpu_sampling import CpuSampling
from pdserve.kernels.ops import Ops, SamplingOps, select

log = logging.getLogger(__name__)

MAX_THREADS = 16
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "int8": torch.int8}
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    decoder: Decoder | NativeDecoder
    ops: SamplingOps  # on the same kernels
    card: CardData


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Finds, reads and expands the model that `config` names.

    `progress` gets what is being done and the fraction of it, from any thread.
    Raises CheckpointError with a message for the person who named the model, ValueError for options
    that contradict each other.
    """
    native = wants_native(config)  # before anything takes time
    found = resolve(config.model, progress)
    checkpoint = open_checkpoint(found.path)
    try:
        model = parse_config(checkpoint.hf_config)
    except UnsupportedModel as error:
        raise CheckpointError(f"{found.path}: {error}") from error
    progress("reading the tokenizer", 0.0)
    text = checkpoint.text_files()  # before the weights: what is wrong here is found at once
    backend = CpuKernels(isa=config.native_isa) if native else select(config.device)
    decoder, digest = _load_weights(config, checkpoint, model, backend, progress)
    card = _card(config, found, checkpoint, text, model, digest)
    ops = CpuSampling(backend.context) if isinstance(backend, CpuKernels) else backend
    return LoadedModel(decoder, ops, card)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file or a model directory. Raises CheckpointError."""
    return DirectoryCheckpoint(path) if path.is_dir() else GgufCheckpoint(path, find_mapping)


def find_mapping(arch: str) -> tuple[str, GgufMapping]:
    """By GGUF's general.architecture. Raises CheckpointError that lists the known ones."""
    known = {spec.gguf.arch: spec for spec in known_specs() if spec.gguf}
    if arch not in known:
        names = ", ".join(sorted(known))
        raise CheckpointError(f"GGUF architecture {arch!r} is not known; known: {names}")
    spec = known[arch]
    assert spec.gguf is not None
    return spec.architectures[0], spec.gguf


def wants_native(config: EngineConfig) -> bool:
    """Whether the native kernels run the model. Raises ValueError if they cannot but should."""
    obstacle = ""
    if config.device != "cpu":
        obstacle = f"--device {config.device}"
    elif config.block_size % KV_BLOCK:
        obstacle = f"--block-size {config.block_size}, which is no multiple of {KV_BLOCK}"
    if config.kernels == "native" and obstacle:
        raise ValueError(f"--kernels native contradicts {obstacle}")
    # float32 weights are asked for when exactness against other implementations matters.
    wanted = config.kernels == "native" or (
        config.kernels == "auto" and config.weights != "float32"
    )
    if config.kv_dtype == "int8" and (obstacle or not wanted):
        reason = obstacle or f"--kernels {config.kernels} --weights {config.weights}"
        raise ValueError(f"--kv-dtype int8 needs the native kernels, which {reason} excludes")
    return wanted and not obstacle


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """What the torch kernels compute in; quantized weights are expanded to it at each use."""
    by_device = "float32" if config.device == "cpu" else "bf16"
    return DTYPES[config.weights if config.weights in DTYPES else by_device]


def _load_weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    backend: CpuKernels | Ops,
    progress: Progress,
) -> tuple[Decoder | NativeDecoder, str]:
    """(decoder, weights digest)."""
    shapes = tensor_shapes(model)
    check_names(checkpoint, shapes, model.tied_head)
    dtype, device = compute_dtype(config), torch.device(config.device)
    native = isinstance(backend, CpuKernels)
    stored = config.weights == "quantized" or (native and config.weights == "auto")
    kv_dtype = torch.bfloat16 if native else dtype
    if config.kv_dtype != "auto":
        kv_dtype = KV_DTYPES[config.kv_dtype]
    kv_name = str(kv_dtype).removeprefix("torch.")
    cache = DigestCache()
    digest = cache.get(checkpoint.files)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with WeightLoader(
        checkpoint,
        shapes,
        None if stored else dtype,
        device,
        threads,
        hashed=digest is None,
        copied=native,  # packed
        progress=lambda fraction: progress("loading weights", fraction),
    ) as weights:
        decoder: Decoder | NativeDecoder
        if isinstance(backend, CpuKernels):
            decoder = NativeDecoder(model, weights, backend, kv_name)
        else:
            decoder = Decoder(model, weights, backend, dtype, kv_name, device)
        if digest is None:
            digest = weights.digest()
            cache.put(checkpoint.files, digest)
    if weights.expanded_bytes:
        log.info("weights expanded to %s: %.0f MB", dtype, weights.expanded_bytes / 1e6)
    return decoder, digest


def _card(
    config: EngineConfig,
    found: Resolved,
    checkpoint: Checkpoint,
    text: TextFiles,
    model: ModelConfig,
    digest: str,
) -> CardData:
    stats = [os.stat(file) for file in checkpoint.files]
    return CardData(
        name=config.served_name or found.name,
        architecture=model.architecture,
        context_len=min(config.context_len or model.context_len, model.context_len),
        vocab_size=model.vocab_size,
        # A tokenizer may have more ids than the model; those are never generated.
        eos_ids=tuple(i for i in text.eos_ids if i < model.vocab_size),
        bos_id=text.bos_id,
        adds_bos=text.adds_bos,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        weights_digest=digest,
        quantization=quantization_label(checkpoint, tensor_shapes(model)),
        created=int(max(stat.st_mtime for stat in stats)),
        weights_bytes=sum(stat.st_size for stat in stats),
        generation_config=text.generation_config,
        config_digest=configuration_digest(model),
    )
