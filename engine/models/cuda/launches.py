"""The kernel launches that compute each kind of part on CUDA. No launch waits for the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.models.config import UnsupportedModel
from pdserve.engine.models.cuda.experts import LaunchedExperts
from pdserve.engine.models.cuda.fuse import AddNorm, Attend, PrepareHeads, SplitLinear
from pdserve.engine.models.cuda.step import Launch, Run
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.parts import (
    Activate,
    Experts,
    Gate,
    HeadLayerNorm,
    HeadLinear,
    Hold,
    LayerNorm,
    Linear,
    Norm,
    Part,
    Scale,
    SliceNorm,
    Xielu,
)
from pdserve.engine.models.rope import RopeConfig
from pdserve.engine.models.xielu import xielu_curve
from pdserve.kernels.cuda.attention import HEAD_STEP, paged_attention
from pdserve.kernels.cuda.layer import (
    HeadNorms,
    HeadRange,
    Rotation,
    activated,
    add,
    add_norm,
    gated,
    norm,
    prepare_heads,
    xielu,
)
from pdserve.kernels.cuda.linear import SplitSums


@dataclass(frozen=True, slots=True)
class LaunchSetup:
    """What launches are made from: the model's weights on the device, and the tables of each
    rope."""

    weights: DeviceWeights
    ropes: dict[RopeConfig, Rotation]  # of every position of a context


def launch_of(part: Part, setup: LaunchSetup) -> Launch:
    """Make the launch that computes a part. Raises UnsupportedModel for a kind of part that the
    CUDA kernels cannot compute."""
    weights = setup.weights
    match part:
        case Norm() | LayerNorm():
            return LaunchedNorm(part, setup)
        case AddNorm():
            return _add_norm(part, setup)
        case SliceNorm():
            return _slice_norm(part, setup)
        case HeadLayerNorm():
            return _head_layer_norm(part, setup)
        case Linear():
            return _mapped(weights.product(part.weights, part.biases))
        case SplitLinear():  # the next part accepts x or the sums of its splits
            return _mapped(weights.product(part.linear.weights, part.linear.biases).split)
        case HeadLinear():
            return LaunchedHeadLinear(part, setup)
        case PrepareHeads():
            return LaunchedHeads(part, setup)
        case Attend():
            return LaunchedAttention(part, setup)
        case Gate():
            return _gate(part)
        case Activate(activation=activation):
            return _mapped(lambda x: activated(x, activation))
        case Xielu():
            curve = xielu_curve(part, weights.stored)
            return _mapped(lambda x: xielu(x, **curve))
        case Scale(factor=factor):
            return _mapped(lambda x: x * factor)  # rounded to x's dtype
        case Hold():
            return hold
        case Experts():
            return LaunchedExperts(part, weights)
    raise UnsupportedModel(
        f"the cuda kernels cannot compute {type(part).__name__}; use --kernels reference"
    )


def _mapped(function: Callable[[Tensor], Tensor | SplitSums]) -> Launch:
    """Return a launch that replaces x, the value passed from part to part, by function(x)."""

    def launch(run: Run) -> None:
        run.x = function(run.x)

    return launch


def _gate(part: Gate) -> Launch:
    """Return the launch of a gated activation, which maps x [T, 2 N], or the split sums of x, to
    [T, N]."""

    def launch(run: Run) -> None:
        run.x = gated(run.sums, part.activation)

    return launch


def hold(run: Run) -> None:
    """Set x aside in `run.held` until a later sum adds it to the residual stream; x becomes the
    residual stream."""
    run.x, run.held = run.residual, run.x


class LaunchedNorm:
    """Launches an RMS norm or a layer norm: replaces x by its norm."""

    def __init__(self, part: Norm | LayerNorm, setup: LaunchSetup) -> None:
        self.eps = part.eps
        self.is_layer = isinstance(part, LayerNorm)
        weights = setup.weights
        if isinstance(part, LayerNorm):
            self.weight = weights.vector(part.weight)
            self.bias = weights.vector(part.bias) if part.bias else None
        else:
            self.weight, self.bias = weights.vector(part.weight, part.offset), None

    def __call__(self, run: Run) -> None:
        run.x = self.of(run.x)

    def of(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.eps, is_layer=self.is_layer)


def _add_norm(part: AddNorm, setup: LaunchSetup) -> Launch:
    """Return the launch that adds x to the residual stream. x becomes the stream, or the stream's
    norm if the part has one."""
    stream_norm = LaunchedNorm(part.norm, setup) if part.norm else None

    def launch(run: Run) -> None:
        held = run.held if part.held else None
        if stream_norm is None:
            add(run.residual, run.sums, held, part.factor)
            run.x = run.residual
        else:
            run.x = add_norm(
                run.residual,
                run.sums,
                stream_norm.weight,
                stream_norm.bias,
                stream_norm.eps,
                is_layer=stream_norm.is_layer,
                held=held,
                factor=part.factor,
            )

    return launch


def _slice_norm(part: SliceNorm, setup: LaunchSetup) -> Launch:
    """Return the launch that norms a slice of x in place: the columns from `part.begin` on, as many
    as the weight has."""
    weight = setup.weights.vector(part.weight)

    def launch(run: Run) -> None:
        columns = run.x[:, part.begin : part.begin + len(weight)]
        norm(columns, weight, None, part.eps, out=columns)

    return launch


def _head_layer_norm(part: HeadLayerNorm, setup: LaunchSetup) -> Launch:
    """Return the launch that norms each head of q and of k in place."""
    dim, vector = part.heads.dim, setup.weights.vector
    q, k = (torch.cat([vector(spec) for spec in specs]) for specs in (part.q, part.k))

    def launch(run: Run) -> None:
        for begin, weight in ((0, q), (len(q), k)):
            columns = run.x[:, begin : begin + len(weight)]
            count = len(weight) // dim
            norm(columns, weight, None, part.eps, is_layer=True, heads=count, out=columns)

    return launch


class LaunchedHeadLinear:
    """Launches a product with a separate matrix for each head: maps x [T, heads * (kept + inputs) +
    rest] to [T, heads * (kept + outputs) + rest]. `kept` and `rest` values are copied."""

    def __init__(self, part: HeadLinear, setup: LaunchSetup) -> None:
        raw = setup.weights.stored(part.weight.name)
        stack = [raw.matrix(n) for n in range(raw.shape[0])] if len(raw.shape) > 2 else [raw]
        self._products = [setup.weights.product_of([matrix]) for matrix in stack]
        *_, self._outputs, self._inputs = part.weight.shape
        self._kept = part.kept

    def __call__(self, run: Run) -> None:
        x, kept, count = run.x, self._kept, len(self._products)
        in_width, out_width = kept + self._inputs, kept + self._outputs
        rest = x[:, count * in_width :]
        width = count * out_width + rest.shape[1]
        out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
        if kept:
            heads = x[:, : count * in_width].view(len(x), count, in_width)
            out[:, : count * out_width].view(len(x), count, out_width)[:, :, :kept] = heads[
                :, :, :kept
            ]
        for n, product in enumerate(self._products):
            inputs = x[:, n * in_width + kept : (n + 1) * in_width]
            product(inputs, out[:, n * out_width + kept : (n + 1) * out_width])
        out[:, count * out_width :] = rest
        run.x = out


class LaunchedHeads:
    """Launches norm and rope of the heads in x. Queries change in place. Keys and values go to the
    cache and stay unchanged in x; if the part stores nothing, keys also change in place."""

    def __init__(self, part: PrepareHeads, setup: LaunchSetup) -> None:
        heads, self._layer = part.heads, part.layer
        if self._layer is None:  # all stay in x, like queries
            self._range = HeadRange(part.begin, heads.q + heads.kv, 0, 0, heads.dim)
        else:
            values = heads.kv if part.has_values else 0
            self._range = HeadRange(part.begin, heads.q, heads.kv, values, heads.dim)
        self._rotation = setup.ropes[part.rope] if part.rope else None
        self._norms = None
        if part.norm:
            q, k = (setup.weights.vector(spec, part.norm.offset) for spec in part.norm.tensors())
            self._norms = HeadNorms(q, k, part.norm.eps)

    @property
    def stores(self) -> bool:
        return self._layer is not None

    def __call__(self, run: Run) -> None:
        kv, group = (None, 0) if self._layer is None else run.kv[self._layer]
        slots, positions = run.inputs.groups[group].slots, run.inputs.positions
        prepare_heads(run.x, self._range, self._norms, self._rotation, positions, kv, slots)


class LaunchedAttention:
    """Launches attention. Replaces x [T, columns], whose first columns are the queries, by the
    outputs of the heads: [T, q heads * size], where size is `latent` with latent attention, else
    the head dim."""

    def __init__(self, part: Attend, setup: LaunchSetup) -> None:
        self._part, self._layer = part.attention, part.layer
        if (dim := part.attention.heads.dim) % HEAD_STEP:
            raise UnsupportedModel(
                f"the cuda kernels support head dims that are multiples of {HEAD_STEP}, not {dim}; "
                "use --kernels reference"
            )
        sinks = part.attention.sinks
        self._sinks = setup.weights.vector(sinks) if sinks else None

    def __call__(self, run: Run) -> None:
        part, heads = self._part, self._part.heads
        kv, group = run.kv[self._layer]
        queries = run.x[:, : heads.q * heads.dim].view(len(run.x), heads.q, heads.dim)
        attended = paged_attention(
            queries,
            kv,
            run.inputs.groups[group].rows,
            part.scale,
            part.window,
            part.soft_cap,
            self._sinks,
            part.latent,
        )
        run.x = attended.flatten(1)
