"""Every kernel against float64: the largest difference, relative to the largest value.

On a GPU its pieces are parallel processes, since most of the time is compilation.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from builders.attention_rows import plan_rows
from builders.linear_cases import values_of
from part import MeasuredPart, run
from torch import Tensor

from pdserve.engine.models import ExpertRouting, Experts, Linear
from pdserve.engine.models.cuda.experts import LaunchedExperts
from pdserve.engine.models.cuda.step import Run
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.parts import Expert, TensorSpec
from pdserve.engine.models.torch_parts import choose_experts
from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.convert import unpack
from pdserve.kernels import reference
from pdserve.kernels.cuda.attention import paged_attention
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
)
from pdserve.kernels.cuda.linear import linear, pack
from pdserve.kernels.cuda.sampling import CudaSampling
from pdserve.kernels.sampling_ops import StreamSettings

FORMATS = ("BF16", "Q4_K", "Q8_0", "INT4", "INT8", "FP8")
HEAD_DIMS = (64, 128, 256)
Case = tuple[str, Tensor, Tensor]  # name, result, float64 reference


def measure(part: MeasuredPart) -> None:
    pieces: dict[str, Callable[[], Iterator[Case]]] = {
        **{f"products of {one}": partial(products, part, one) for one in FORMATS},
        **{f"attention of {dim}": partial(attention, part, dim) for dim in HEAD_DIMS},
        "experts": partial(experts, part),
        "layers": partial(layers, part),
        "activations": partial(activations, part),
    }
    if not (part.only or part.fake or part.smallest):
        side_by_side(part, [*pieces, "sampling"])
        return
    worst: dict[str, float] = {}
    for piece, cases in pieces.items():
        if part.only not in ("", piece):
            continue
        for name, result, expected in cases():
            if not result.isfinite().all():
                raise ValueError(f"{name}: a result is not finite")
            error = float((result.double() - expected).abs().max() / expected.abs().max())
            worst[name] = max(worst.get(name, 0.0), error)
            part.note(errors=worst)
    if part.only in ("", "sampling"):
        sampling(part)


def side_by_side(part: MeasuredPart, pieces: list[str]) -> None:
    running = []
    for number, piece in enumerate(pieces):
        folder = part.folder / f"kernels-{number}"
        folder.mkdir()
        words = [sys.executable, __file__, "--folder", str(folder), "--only", piece]
        running.append((piece, folder, subprocess.Popen(words, stdout=sys.stderr)))
    errors: dict[str, float] = {}
    while running:
        ended = [one for one in running if one[2].poll() is not None]
        if not ended:
            time.sleep(0.1)
            continue
        piece, folder, process = ended[0]
        running.remove(ended[0])
        code = process.returncode
        path = folder / "kernels.json"
        record = json.loads(path.read_text()) if path.exists() else {"figures": {}}
        errors |= record["figures"].pop("errors", {})
        part.note(errors=errors, **record["figures"])
        if code:
            part.fail(f"{piece}: {record.get('error', f'exit code {code}')}")


def drawn(part: MeasuredPart, *shape: int, seed: int = 0) -> Tensor:
    """The same random numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(part.device)


# --- products with weights


def matrix(format: str, rows: int, cols: int, seed: int = 0) -> RawTensor:
    rng = np.random.default_rng((rows + cols, seed))
    if format == "BF16":
        values = torch.from_numpy(rng.normal(0, 0.02, (rows, cols)).astype(np.float32)).bfloat16()
        return RawTensor(
            {"values": values.view(torch.int16).numpy().view(np.uint16)}, format, (rows, cols)
        )
    scale = np.float16(0.002)
    if format in ("Q4_K", "Q8_0"):
        values, size, scales = (256, 144, [scale, scale]) if format == "Q4_K" else (32, 34, [scale])
        blocks = rng.integers(0, 256, (rows, cols // values, size), np.uint8)
        blocks[..., : 2 * len(scales)] = np.array(scales).view(np.uint8)
        return RawTensor({"blocks": blocks.reshape(rows, -1)}, format, (rows, cols))
    bits, group = 4 if format == "INT4" else 8, 128
    codes = rng.integers(0, 256, (rows, cols * bits // 8), np.uint8)
    if format == "FP8":
        codes &= 0xBF  # neither NaN nor large
    scales = rng.uniform(0.001, 0.003, (rows, cols // group)).astype(np.float16)
    parts = {"codes": codes, "scales": scales}
    return RawTensor(parts, format, (rows, cols))


def products(part: MeasuredPart, format: str) -> Iterator[Case]:
    small = part.fake or part.smallest
    tokens = (1, 17) if small else (1, 16, 64, 256, 2048)
    shapes = ((70, 256), (66, 768)) if small else ((4096, 1024), (1024, 3072), (130, 4096))
    for rows, cols in shapes:
        raw = matrix(format, rows, cols)
        held = pack(format, rows, cols, raw.parts, torch.bfloat16, part.device)
        weight = values_of(format, raw.parts, rows, cols, torch.bfloat16)
        weight = weight.to(part.device).double()
        for count in tokens[: 1 if part.fake and format != "BF16" else None]:
            x = drawn(part, count, cols, seed=count).bfloat16()
            bias = drawn(part, rows, seed=1)
            found = linear(x, held, bias, out_dtype=torch.float32)
            yield f"linear {format}", found, x.double() @ weight.T + bias.double()
            alone = linear(x[-1:], held, bias, out_dtype=torch.float32)
            yield f"linear {format}, bits alone", found[-1:], alone.double()


# --- attention


def attention(part: MeasuredPart, head_dim: int) -> Iterator[Case]:
    """Decode rows and chunks; all data that belongs to no row is NaN."""
    small = part.fake or part.smallest
    lens = (5, 600) if small else (1, 100, 700, 3000)
    news = (1, 9) if small else (1, 300)
    for window, cap, sinks in ((0, 0.0, False), (33, 5.0, True)):
        rows = [(min(new, n), n) for new in news for n in lens]
        rows.sort(key=lambda row: row[0] > 1)
        yield attended(part, rows, head_dim, window, cap, sinks)


def attended(
    part: MeasuredPart,
    rows: list[tuple[int, int]],
    head_dim: int,
    window: int,
    cap: float,
    sinks: bool,
) -> Case:
    starts = tuple(sum(new for new, _ in rows[:n]) for n in range(len(rows) + 1))
    lens = tuple(total for _, total in rows)
    columns = [-(-n // 16) for n in lens]
    table = torch.zeros(len(rows), max(columns), dtype=torch.int32)
    kv = torch.full((sum(columns) + 1, 2, 2, 16, head_dim), math.nan, dtype=torch.bfloat16)
    free = iter(torch.randperm(sum(columns)).tolist())
    for row, count in enumerate(columns):
        for column in range(count):
            block = table[row, column] = next(free) + 1
            kept = min(16, lens[row] - 16 * column)
            kv[block, :, :, :kept] = torch.randn(2, 2, kept, head_dim).bfloat16()
    q = drawn(part, starts[-1], 6, head_dim).bfloat16()
    weights = drawn(part, 6, seed=2) if sinks else None
    kv, table = kv.to(part.device), table.to(part.device)
    num_decode_rows, scale = sum(new == 1 for new, _ in rows), head_dim**-0.5
    plan = plan_rows(starts, lens, num_decode_rows, table)
    on_host = {name: getattr(plan, name) for name in ("starts", "kv_lens", "tiles")}
    plan = replace(plan, **{name: numbers.to(part.device) for name, numbers in on_host.items()})
    found = paged_attention(q, kv, plan, scale, window, cap, weights)
    expected = reference.paged_attention(
        q.double(), kv.double(), table.long(), starts, lens, num_decode_rows, scale, window, cap,
        None if weights is None else weights.double(),
    )  # fmt: skip
    return f"attention of {head_dim}", found, expected


# --- experts


def experts(part: MeasuredPart) -> Iterator[Case]:
    """A layer of experts: the routing, products, and the weighted sum."""
    small = part.fake or part.smallest
    hidden, size, count, top_k = (64, 32, 5, 2) if small else (2048, 768, 128, 8)
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    raws = {
        f"{n}.{name}": matrix("BF16", *shape, seed=n) for n in range(count)
        for name, shape in shapes.items()
    }  # fmt: skip
    raws["router"] = matrix("BF16", count, hidden)
    values = {name: torch.from_numpy(unpack(raw)).to(part.device) for name, raw in raws.items()}

    def spec(name: str) -> TensorSpec:
        return TensorSpec(name, raws[name].shape)

    mlps = tuple(
        Expert(Linear((spec(f"{n}.gate"), spec(f"{n}.up"))), Linear((spec(f"{n}.down"),)))
        for n in range(count)
    )
    routing = ExpertRouting(top_k, normalized=True)
    layer = Experts(spec("router"), None, None, None, mlps, None, routing, "silu")
    held = DeviceWeights(raws.__getitem__, torch.bfloat16, torch.device(part.device))
    launched = LaunchedExperts(layer, held)
    for tokens in (1, 7) if small else (1, 64, 256):
        x = drawn(part, tokens, hidden, seed=tokens).bfloat16()
        run = Run(x, None, [])  # type: ignore[arg-type]
        launched(run)
        chosen, weights = choose_experts(x.float() @ values["router"].T, None, routing)
        expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=x.device)
        for token in range(tokens):
            for n, weight in zip(chosen[token].tolist(), weights[token].double(), strict=True):
                gate, up, down = (values[f"{n}.{name}"].double() for name in shapes)
                row = x[token].double()
                between = torch.nn.functional.silu(gate @ row) * (up @ row)
                expected[token] += weight * (down @ between)
        yield "experts", run.x, expected


# --- other kernels


def layers(part: MeasuredPart) -> Iterator[Case]:
    small = part.fake or part.smallest
    tokens, size = (2, 80) if small else (300, 4096)
    x, stream = (drawn(part, tokens, size, seed=n).bfloat16() for n in (1, 2))
    weight, bias = drawn(part, size, seed=3), drawn(part, size, seed=4)

    def rms(x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    yield "norm", norm(x, weight, None, 1e-5), rms(x.double())
    layer = torch.nn.functional.layer_norm(
        x.double(), (size,), weight.double(), bias.double(), 1e-5
    )
    yield "layer norm", norm(x, weight, bias, 1e-5, is_layer=True), layer
    total = (stream.double() + x.double()).bfloat16()
    once = stream.clone()
    add(once, x)
    yield "add", once, total.double()
    normed = add_norm(stream, x, weight, None, 1e-5)
    yield "add and norm", normed, rms(total.double())
    yield from heads(part, tokens)


def heads(part: MeasuredPart, tokens: int) -> Iterator[Case]:
    """Norms of heads and rope of 4 heads of q and 2 of k, with 2 of v unchanged."""
    dim = 64
    x = drawn(part, tokens, 8 * dim).bfloat16()
    q_weight, k_weight = drawn(part, dim, seed=1), drawn(part, dim, seed=2)
    angles = torch.arange(tokens)[:, None] * (0.3 ** torch.arange(dim // 2))
    cos, sin = (a.float().to(part.device) for a in (angles.cos(), angles.sin()))
    kv = torch.zeros(tokens // 16 + 2, 2, 2, 16, dim, dtype=torch.bfloat16, device=part.device)
    positions = torch.arange(tokens, device=part.device, dtype=torch.int32)
    before = x.double().view(tokens, 8, dim)
    weights = torch.cat([q_weight.expand(4, dim), k_weight.expand(2, dim)]).double()
    qk = before[:, :6]
    qk = qk * (qk.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weights
    first, second = qk.bfloat16().double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat([first * c - second * s, second * c + first * s], -1)
    prepare_heads(
        x, HeadRange(0, 4, 2, 2, dim), HeadNorms(q_weight, k_weight, 1e-6), Rotation(cos, sin),
        positions, kv, positions + 16,
    )  # fmt: skip
    yield "queries", x.view(tokens, 8, dim)[:, :4], turned[:, :4]
    stored = kv[1:].permute(0, 3, 1, 2, 4).flatten(0, 1)[:tokens]
    yield "keys", stored[:, 0], turned[:, 4:]
    yield "values", stored[:, 1], before[:, 6:]


def activations(part: MeasuredPart) -> Iterator[Case]:
    tokens, size = (2, 40) if part.fake or part.smallest else (300, 14336)
    x = (3 * drawn(part, tokens, 2 * size)).bfloat16()
    gate, up = x.double().chunk(2, -1)
    functions = torch.nn.functional
    for name, of in (
        ("silu", functions.silu),
        ("gelu", functions.gelu),
        ("gelu_tanh", lambda y: functions.gelu(y, approximate="tanh")),
    ):
        yield f"gated {name}", gated(x, name), of(gate) * up
        yield name, activated(x, name), of(x.double())
    cut, linear_part = gate.clamp(max=7), up.clamp(-7, 7) + 1
    oai = cut * torch.sigmoid(1.702 * cut) * linear_part
    yield "gated swiglu_oai", gated(x, "swiglu_oai"), oai


# --- sampling


def sampling(part: MeasuredPart) -> None:
    """The tokens equal the reference's on the host, and log-probabilities those in
    float64."""
    small = part.fake or part.smallest
    unlike = total = 0
    for rows, vocab in ((4, 300),) if small else ((4000, 1000), (256, 151936)):
        logits, tokens, others = sampled_tokens(part, rows, vocab)
        unlike += sum(a != b for a, b in zip(tokens, others, strict=True))
        total += rows
    part.note(unlike_tokens=unlike, tokens=total)
    scores = [own for own, _ in CudaSampling().logprobs(logits, tokens, 5)]
    exact = logits.double().log_softmax(-1).cpu()[range(len(tokens)), tokens]
    error = float((torch.tensor(scores, dtype=torch.float64) - exact).abs().max())
    part.note(logprob_error=error)


def sampled_tokens(
    part: MeasuredPart, rows: int, vocab: int
) -> tuple[Tensor, list[int], list[int]]:
    """Logits, and the tokens that both sample from them."""
    kinds = (
        StreamSettings(temperature=0.0),
        StreamSettings(temperature=0.6, seed=5),
        StreamSettings(temperature=1.0, top_k=20, top_p=0.9, seed=7),
        StreamSettings(temperature=0.8, min_p=0.1, repetition_penalty=1.2, prompt_ids=(3, 4)),
        StreamSettings(frequency_penalty=0.9, penalty_window=3, prompt_ids=(3, 4), seed=9),
    )
    logits = 3 * drawn(part, rows, vocab)
    sampled = []
    for ops, scores in ((CudaSampling(), logits), (reference, logits.cpu())):
        streams = [ops.stream(kinds[n % len(kinds)], vocab) for n in range(rows)]
        sampled.append(ops.sample(scores, list(range(rows)), streams, [[1, 2]] * rows))
    return logits, sampled[1], sampled[0]


if __name__ == "__main__":
    run(measure)
