"""In-situ quantization: which matrices of a model are quantized while it loads, and to what."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from pdserve.engine.checkpoints.source import CheckpointError, Layout
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import EMBEDDING, HEAD, layer_parts
from pdserve.engine.models.parts import Activate, Attention, Experts, Gate, HeadLinear, Linear, Part
from pdserve.engine.weights.mix import MatrixRole, ModelSize, fitting, mixed
from pdserve.engine.weights.plain import PLAIN

log = logging.getLogger(__name__)

QKV = (MatrixRole.OTHER, MatrixRole.KEY, MatrixRole.VALUE)


def isq_formats(type: str, model: ModelConfig, layout: Callable[[str], Layout]) -> dict[str, str]:
    """The format of each matrix that is stored as plain numbers, by name; vectors, routers and what
    is quantized already stay as they are. Raises CheckpointError if that leaves none."""
    about = ModelSize(
        model.num_layers,
        model.num_heads // model.num_kv_heads,
        any(isinstance(p, Experts) for n in range(model.num_layers) for p in layer_parts(model, n)),
    )
    found: dict[str, str] = {}
    unfit: Counter[str] = Counter()
    quantized: Counter[str] = Counter()
    for name, role, layer in _matrices(model):
        stored = layout(name)
        if stored.format not in PLAIN:
            quantized[stored.format] += 1
            continue
        wanted = mixed(type, role, layer, about)
        format = fitting(wanted, stored.shape[-1])
        if format != wanted:
            unfit[f"{stored.shape[-1]} columns do not fit {wanted}: {format or 'as stored'}"] += 1
        if format:
            found[name] = format
    if not found:
        why = ", ".join(quantized) or "no row is a multiple of 32 values"
        raise CheckpointError(f"--isq {type}: there is nothing to quantize ({why})")
    for format, count in quantized.items():
        log.warning("%d matrices stay %s, as they are stored", count, format)
    for reason, count in unfit.items():
        log.info("%d matrices: %s", count, reason)
    return found


def _matrices(model: ModelConfig) -> Iterator[tuple[str, MatrixRole, int]]:
    """Name, role and layer of each."""
    yield EMBEDDING, MatrixRole.HEAD if model.tied_head else MatrixRole.OTHER, 0
    for n in range(model.num_layers):
        yield from ((name, role, n) for name, role in _of_layer(layer_parts(model, n)))
    if not model.tied_head:
        yield HEAD, MatrixRole.HEAD, model.num_layers - 1


def _of_layer(parts: tuple[Part, ...]) -> Iterator[tuple[str, MatrixRole]]:
    before: Part | None = None  # the last part that is no norm
    for part in parts:
        match part:
            case Linear():
                names = [spec.name for spec in part.weights]
                roles = [_role_behind(before)] * len(names)
                if before is None and len(names) == len(QKV):
                    roles = [*QKV]
                yield from zip(names, roles, strict=True)
            case HeadLinear():
                role = MatrixRole.OTHER if len(part.weight.shape) == 2 else MatrixRole.VALUE
                yield part.weight.name, role
            case Experts():
                for expert in (*part.experts, *((part.shared,) if part.shared else ())):
                    yield from ((spec.name, MatrixRole.OTHER) for spec in expert.gate_up.weights)
                    yield from ((spec.name, MatrixRole.DOWN) for spec in expert.down.weights)
        if isinstance(part, Linear | Attention | Gate | Activate):
            before = part


def _role_behind(part: Part | None) -> MatrixRole:
    """Of the matrix that follows it."""
    match part:
        case Attention():
            return MatrixRole.OUTPUT
        case Gate() | Activate():
            return MatrixRole.DOWN
    return MatrixRole.OTHER
