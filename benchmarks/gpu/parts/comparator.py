"""The speed of a short loop of plain torch with the requests of the part throughput: pages of keys,
prompts first, one batch of all running requests, CUDA graphs for decode, small functions compiled.

It works like nano-vllm. Attention is flash_attn's if installed; otherwise torch's, over keys that
are gathered from their pages.
"""

import importlib.util
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from clock import wait
from part import MeasuredPart, run
from random_models import FAKE_QWEN3, QWEN3_0_6B, RandomWeights, config_of, random_decoder
from sequences import BLOCK_SIZE, Row, Sequences, make_pool
from throughput import ROWS, TEMPERATURE, requests
from torch import Tensor

from pdserve.engine.api import Request
from pdserve.engine.models.rope import RopeTable
from pdserve.engine.weights import VALUES

PAGE, BATCH_TOKENS = 256, 16384
LEAST_RATIO = 2.0
MOST_ERROR = 0.05  # of logits against those of the CUDA kernels: both compute in bfloat16
FLASH = importlib.util.find_spec("flash_attn") is not None


def rms(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * weight


def add_rms(x: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = stream + x
    return rms(stream, weight), stream


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding. x [T, heads, dim]; cos and sin [T, 1, dim / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def pick(logits: Tensor) -> Tensor:
    """Draw from the softmax: the first of exponential times with these rates."""
    rates = torch.softmax(logits.float() / TEMPERATURE, -1)
    return (rates / torch.empty_like(rates).exponential_().clamp_min_(1e-10)).argmax(-1)


class Layer(NamedTuple):
    """Weights of a layer."""

    attn_in: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    ffn_in: Tensor
    gate_up: Tensor
    down: Tensor


class Numbers(NamedTuple):
    """Inputs of a batch of decode rows, on the device."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    lens: Tensor
    table: Tensor  # [rows, pages]


class TorchModel:
    """Qwen3 with a paged cache; owns its graphs and its pages."""

    def __init__(self, hf_config: dict[str, Any], device: str, num_pages: int) -> None:
        self.config = config = config_of(hf_config)
        self.device = device
        given = RandomWeights(config)

        def held(*names: str) -> Tensor:
            parts = [
                np.ascontiguousarray(given(name).parts[VALUES]).view(np.int16) for name in names
            ]
            return torch.from_numpy(np.concatenate(parts)).to(device).view(torch.bfloat16)

        def layer(at: str) -> Layer:
            attn, mlp = at + "self_attn.", at + "mlp."
            return Layer(
                held(at + "input_layernorm.weight"),
                held(*(f"{attn}{name}_proj.weight" for name in "qkv")),
                held(attn + "q_norm.weight"),
                held(attn + "k_norm.weight"),
                held(attn + "o_proj.weight"),
                held(at + "post_attention_layernorm.weight"),
                held(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                held(mlp + "down_proj.weight"),
            )

        self.embedding = held("model.embed_tokens.weight")
        self.norm = held("model.norm.weight")
        self.layers = [layer(f"model.layers.{n}.") for n in range(config.num_layers)]
        shape = (num_pages, PAGE, config.num_kv_heads, config.head_dim)
        kind = {"dtype": torch.bfloat16, "device": device}
        self.caches = [
            (torch.zeros(shape, **kind), torch.zeros(shape, **kind)) for _ in self.layers
        ]
        (rotation,) = {one.rope for one in config.layers if one.rope}
        table = RopeTable(rotation, config.context_len)
        table.reserve(config.context_len)
        self.cos, self.sin = (
            torch.from_numpy(t).to(device)[:, None] for t in (table.cos, table.sin)
        )
        compiled = device != "cpu"
        for function in (rms, add_rms, rope, silu_mul, pick):
            made = torch.compile(function, dynamic=True) if compiled else function
            setattr(self, function.__name__, made)
        self._graphs: dict[tuple[int, int], tuple[Any, Numbers, Tensor]] = {}

    def prefill(self, ids: list[list[int]], pages: list[list[int]]) -> Tensor:
        """Final hidden states of the last token of each sequence."""
        lens = [len(one) for one in ids]
        positions = np.concatenate([np.arange(n) for n in lens])
        slots = np.concatenate(
            [np.array(own)[np.arange(n) // PAGE] * PAGE + np.arange(n) % PAGE
             for own, n in zip(pages, lens, strict=True)]
        )  # fmt: skip

        def attend(q: Tensor, k: Tensor, v: Tensor, cache: object) -> Tensor:
            if FLASH and self.device != "cpu":
                from flash_attn import flash_attn_varlen_func

                most = max(lens)
                return flash_attn_varlen_func(q, k, v, starts, starts, most, most, causal=True)
            parts = [
                F.scaled_dot_product_attention(
                    *(t.transpose(0, 1)[None] for t in some), is_causal=True, enable_gqa=True
                )[0].transpose(0, 1)
                for some in zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
            ]
            return torch.cat(parts)

        starts = self._ints([0, *np.cumsum(lens)]).int()
        flat = self._ints([i for one in ids for i in one])
        hidden = self._run(flat, self._ints(positions), self._ints(slots), attend)
        return hidden[self._ints(np.cumsum(lens) - 1)]

    def decode(self, numbers: Numbers) -> Tensor:
        """Final hidden states of all rows."""

        def attend(q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            if FLASH and self.device != "cpu":
                from flash_attn import flash_attn_with_kvcache

                lens, table = numbers.lens.int(), numbers.table.int()
                found = flash_attn_with_kvcache(
                    q[:, None], *cache, cache_seqlens=lens, block_table=table, causal=True
                )
                return found[:, 0]
            rows, heads, dim = q.shape
            keys, values = (c[numbers.table].flatten(1, 2).transpose(1, 2) for c in cache)
            seen = torch.arange(keys.shape[2], device=q.device) < numbers.lens[:, None]
            groups = q.view(rows, keys.shape[1], -1, dim)
            mask = seen[:, None, None].expand(-1, groups.shape[1], groups.shape[2], -1)
            found = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask)
            return found.reshape(rows, heads, dim)

        return self._run(numbers.ids, numbers.positions, numbers.slots, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T

    def _run(self, ids: Tensor, positions: Tensor, slots: Tensor, attend: Any) -> Tensor:
        config, made = self.config, self
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        cos, sin = self.cos[positions], self.sin[positions]
        x, stream = F.embedding(ids, self.embedding), None
        for layer, cache in zip(self.layers, self.caches, strict=True):
            if stream is None:
                x, stream = made.rms(x, layer.attn_in), x
            else:
                x, stream = made.add_rms(x, stream, layer.attn_in)
            q, k, v = (
                t.unflatten(-1, (-1, config.head_dim))
                for t in (x @ layer.qkv.T).split([q_size, kv_size, kv_size], -1)
            )
            q = made.rope(made.rms(q, layer.q_norm), cos, sin)
            k = made.rope(made.rms(k, layer.k_norm), cos, sin)
            for kept, new in zip(cache, (k, v), strict=True):
                kept.view(-1, *new.shape[1:]).index_copy_(0, slots, new)
            x = attend(q, k, v, cache).flatten(1) @ layer.o.T
            x, stream = made.add_rms(x, stream, layer.ffn_in)
            x = made.silu_mul(x @ layer.gate_up.T) @ layer.down.T
        return made.add_rms(x, stream, self.norm)[0]

    def record(self, rows: list[int], pages: list[int]) -> None:
        """Record a CUDA graph for each maximum number of rows and of pages."""
        for most_pages in reversed(pages):
            for count in reversed(rows):
                empty = [self._ints(np.zeros(count, np.int64)) for _ in range(3)]
                lens = self._ints(np.ones(count, np.int64))
                table = self._ints(np.zeros((count, most_pages), np.int64))
                numbers = Numbers(*empty, lens, table)
                hidden = self.decode(numbers)
                graph = None
                if self.device != "cpu":
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    pool = next((g.pool() for g, *_ in self._graphs.values()), None)
                    with torch.cuda.graph(graph, pool=pool):
                        hidden = self.decode(numbers)
                self._graphs[count, most_pages] = graph, numbers, hidden

    def step(self, ids: list[int], lens: list[int], pages: list[list[int]]) -> Tensor:
        """Final hidden states of decode rows, from the smallest graph that holds them."""
        rows, widest = len(ids), -(-max(lens) // PAGE)
        shape = min(s for s in self._graphs if s[0] >= rows and s[1] >= widest)
        graph, numbers, hidden = self._graphs[shape]
        table = np.zeros((rows, shape[1]), np.int64)
        for row, own in enumerate(pages):
            table[row, : min(len(own), shape[1])] = own[: shape[1]]
        at = np.array(lens) - 1
        slots = table[np.arange(rows), at // PAGE] * PAGE + at % PAGE
        numbers.slots.fill_(0)  # page 0 is unused
        numbers.lens.fill_(1)
        for target, values in zip(numbers, (ids, at, slots, lens, table), strict=True):
            target[:rows].copy_(self._ints(values))
        if graph is None:
            return self.decode(numbers)[:rows]
        graph.replay()
        return hidden[:rows]

    def _ints(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64)).to(self.device)


@torch.inference_mode()
def answer(model: TorchModel, wave: list[Request], batch_tokens: int = BATCH_TOKENS) -> int:
    """Run all requests to their end: prompts first, then all that run together. Returns the number
    of generated tokens."""
    free = list(range(1, len(model.caches[0][0])))
    made: list[list[int]] = [list(one.prompt_ids) for one in wave]
    ends = [len(one.prompt_ids) + (one.params.max_tokens or 0) for one in wave]
    pages: list[list[int]] = [[free.pop() for _ in range(-(-end // PAGE))] for end in ends]
    waiting, running = list(range(len(wave))), list[int]()
    while waiting or running:
        if waiting:
            chosen = [waiting.pop(0)]
            while waiting and sum(len(made[n]) for n in [*chosen, waiting[0]]) <= batch_tokens:
                chosen.append(waiting.pop(0))
            hidden = model.prefill([made[n] for n in chosen], [pages[n] for n in chosen])
            running += chosen
        else:
            chosen = running
            lens, own = [len(made[n]) for n in chosen], [pages[n] for n in chosen]
            hidden = model.step([made[n][-1] for n in chosen], lens, own)
        tokens = model.pick(model.logits(hidden)).tolist()  # type: ignore[attr-defined]
        for n, token in zip(chosen, tokens, strict=True):
            made[n].append(token)
        running = [n for n in running if len(made[n]) < ends[n]]
    return sum(len(ids) - len(one.prompt_ids) for ids, one in zip(made, wave, strict=True))


def measure(part: MeasuredPart) -> None:
    hf_config = FAKE_QWEN3 if part.fake else QWEN3_0_6B
    wave = requests(part, (2 if part.smallest else 4) if part.fake else ROWS, 1)
    ends = [len(one.prompt_ids) + (one.params.max_tokens or 0) for one in wave]
    model = TorchModel(hf_config, part.device, 2 + sum(-(-end // PAGE) for end in ends))
    part.note(attention="flash_attn" if FLASH else "torch, over gathered keys")
    part.check("the same model", error(part, model, hf_config) <= MOST_ERROR)
    rows = [1, 2, 4, 8, *range(16, ROWS + 1, 16)]
    rows = [n for n in rows if n < len(wave)] + [len(wave)]
    widest = -(-max(ends) // PAGE)
    with torch.inference_mode():
        model.record(rows, [widest] if FLASH else sorted({-(-widest // 2), widest}))
    if not part.fake:
        answer(model, requests(part, 32, 0))  # compiles
    wait(part.device)
    started = time.perf_counter()
    tokens = answer(model, wave)
    seconds = time.perf_counter() - started
    part.note(tokens=tokens, seconds=seconds, tokens_s=tokens / seconds)
    ours = part.earlier("throughput").get("tokens_s")
    if ours is None:
        part.skip("twice as fast", "the part throughput has no figure")
        return
    part.note(ours_of_theirs=ours / (tokens / seconds))
    if FLASH or part.fake:
        part.check("twice as fast", ours >= LEAST_RATIO * tokens / seconds, unless_fake=True)
    else:
        part.skip("twice as fast", "no flash_attn: the loop gathers its pages, which is too easy")


def error(part: MeasuredPart, model: TorchModel, hf_config: dict[str, Any]) -> float:
    """The largest error of the logits of a prompt and of the step after it, relative to the largest
    logit."""
    decoder = random_decoder(hf_config, part.device)
    length = 20
    tokens = np.random.default_rng(5).integers(0, hf_config["vocab_size"], (1, length + 1))
    kv = make_pool(part.device, decoder.kv_groups, 1 + length // BLOCK_SIZE + 1)
    sequence = Sequences(decoder, kv, tokens)
    expected = [sequence.logits([Row(0, 0, length)]), sequence.logits([Row(0, length, length + 1)])]
    ids = list(map(int, tokens[0]))
    with torch.inference_mode():
        model.record([1], [1])
        hidden = [model.prefill([ids[:-1]], [[1]]), model.step(ids[-1:], [length + 1], [[1]])]
        found = [model.logits(one).float() for one in hidden]
    worst = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
    )
    part.note(logits_error=worst)
    return worst


if __name__ == "__main__":
    run(measure)
