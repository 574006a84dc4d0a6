"""In-situ quantization: selects the matrices to quantize while a model loads, and their formats."""

import logging
from collections.abc import Iterator

from pdserve.engine.checkpoints import CheckpointError, ViewedCheckpoint
from pdserve.engine.models import (
    EMBEDDING,
    HEAD,
    Activate,
    Attention,
    Experts,
    Gate,
    HeadLinear,
    Linear,
    ModelConfig,
    Part,
    layer_parts,
)
from pdserve.engine.weights import MatrixRole, Mix, StoredMatrix

log = logging.getLogger(__name__)

QKV = (MatrixRole.OTHER, MatrixRole.KEY, MatrixRole.VALUE)


def isq_formats(type: str, model: ModelConfig, checkpoint: ViewedCheckpoint) -> dict[str, str]:
    """Return the format, by name, of each matrix that is stored as plain numbers.

    Vectors, routers and matrices that are already quantized stay as they are. The formats equal
    those in the file that `pdserve quantize` writes for the same model. Raises CheckpointError if
    no matrix can be quantized.
    """
    n_gqa = model.num_heads // model.num_kv_heads
    mix = Mix(type, model.num_layers, n_gqa, _num_experts(model))
    matrices = (
        StoredMatrix(name, role, layer, stored.format, stored.shape[-1])
        for name, role, layer in _matrices(model, checkpoint)
        for stored in [checkpoint.layout(name)]
    )
    formats, unfit, quantized = mix.plan(matrices)
    if not formats:
        reasons = ", ".join(quantized) or "no row length is a multiple of 32"
        raise CheckpointError(f"--isq {type}: the model has nothing to quantize ({reasons})")
    for format, count in quantized.items():
        log.warning("%d matrices are stored as %s and are not quantized again", count, format)
    for reason, count in unfit.items():
        log.info("%d matrices: %s", count, reason)
    return formats


def _num_experts(model: ModelConfig) -> int:
    parts = (part for n in range(model.num_layers) for part in layer_parts(model, n))
    return next((len(part.experts) for part in parts if isinstance(part, Experts)), 0)


def _matrices(
    model: ModelConfig, checkpoint: ViewedCheckpoint
) -> Iterator[tuple[str, MatrixRole, int]]:
    """Yield name, role and layer of each matrix."""
    yield EMBEDDING, MatrixRole.HEAD if model.tied_head else MatrixRole.OTHER, 0
    for n in range(model.num_layers):
        for name, role in _layer_matrices(layer_parts(model, n), checkpoint):
            yield name, role, n
    if not model.tied_head:
        yield HEAD, MatrixRole.HEAD, model.num_layers - 1


def _layer_matrices(
    parts: tuple[Part, ...], checkpoint: ViewedCheckpoint
) -> Iterator[tuple[str, MatrixRole]]:
    previous: Part | None = None  # the last part that is not a norm
    for part in parts:
        match part:
            case Linear():
                names = [spec.name for spec in part.weights]
                roles = [_role_after(previous)] * len(names)
                if previous is None and len(names) == len(QKV):
                    is_fused = len({checkpoint.source(name) for name in names}) == 1  # one tensor
                    roles = [MatrixRole.VALUE] * len(QKV) if is_fused else [*QKV]
                yield from zip(names, roles, strict=True)
            case HeadLinear():
                yield part.weight.name, MatrixRole.OTHER
            case Experts():
                for expert in (*part.experts, *((part.shared,) if part.shared else ())):
                    yield from ((spec.name, MatrixRole.OTHER) for spec in expert.gate_up.weights)
                    yield from ((spec.name, MatrixRole.DOWN) for spec in expert.down.weights)
        if isinstance(part, Linear | Attention | Gate | Activate):
            previous = part


def _role_after(part: Part | None) -> MatrixRole:
    """Return the role of the matrix that follows `part`."""
    match part:
        case Attention():
            return MatrixRole.OUTPUT
        case Gate() | Activate():
            return MatrixRole.DOWN
    return MatrixRole.OTHER
