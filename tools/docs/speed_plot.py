"""Draw docs/images/speed.svg and speed-dark.svg, the plot of README, from benchmarks/results.

python tools/docs/speed_plot.py docs/images
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
WIDTH, LEFT, RIGHT = 760, 340, 60
BAR, GAP, ROW_GAP = 13, 2, 12
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
ENGINES = {"pdserve": "#2f7ed8", "vLLM": "#c9a227", "llama.cpp": "#8a8f98", "nano-vllm": "#8a8f98"}
# Names of rows in cpu.json, and the peers that it compares there.
CPU_ROWS = (
    ("1 request at a time", {"llama.cpp": "decode_x1_llamacpp"}),
    ("8 requests at a time", {"vLLM": "decode_x8_vllm", "llama.cpp": "decode_x8_llamacpp"}),
    ("32 requests at a time", {"vLLM": "decode_x32_vllm", "llama.cpp": "decode_x32_llamacpp"}),
    (
        "one prompt of 512 tokens (prefill)",
        {"vLLM": "prefill_512_vllm", "llama.cpp": "prefill_512_q4_0"},
    ),
)
# Labels of the loads in gpu-h200-peers.json, in their order.
GPU_ROWS = (
    "0.6B: 256 requests, short prompts",
    "0.6B: 256 requests, prompts of mixed length",
    "8B: 1 request at a time",
    "8B: 64 requests at a time",
    "8B: one prompt of 8,192 tokens (prefill)",
    "8B: 64 prompts of 1,000 tokens (prefill)",
)
PREFILL_TOKENS = {4: 8192, 5: 64000}


@dataclass(frozen=True)
class Group:
    """One load: tokens per second of each engine."""

    label: str
    tokens_s: dict[str, float]


@dataclass(frozen=True)
class Theme:
    """Colors of text."""

    text: str
    muted: str


CAPTION = "Tokens per second: a longer bar is faster. Each group has its own scale."
THEMES = {"": Theme("#1f2328", "#59636e"), "-dark": Theme("#f0f6fc", "#9198a1")}


def cpu_groups(result: dict[str, Any]) -> list[Group]:
    groups = []
    for label, peers in CPU_ROWS:
        rows = {peer: result["rows"][name] for peer, name in peers.items()}
        ours = next(iter(rows.values()))["ours"]
        peer_speeds = {peer: row["theirs"] for peer, row in rows.items()}
        groups.append(Group(label, {"pdserve": ours, **peer_speeds}))
    return groups


def gpu_groups(result: dict[str, Any]) -> list[Group]:
    names = {"pdserve": "pdserve", "vLLM": "vllm", "nano-vllm": "nano-vllm"}
    groups = []
    for number, (label, load) in enumerate(zip(GPU_ROWS, result["loads"], strict=True)):
        speeds = {shown: mean(load[name]) for shown, name in names.items() if name in load}
        if load["unit"] == "seconds":
            speeds = {shown: PREFILL_TOKENS[number] / s for shown, s in speeds.items()}
        groups.append(Group(label, speeds))
    return groups


def svg(panels: list[tuple[str, list[Group]]], theme: Theme) -> str:
    parts: list[str] = []
    y = 16
    parts.append(f'<text x="0" y="{y}" class="muted">{CAPTION}</text>')
    y += 8
    for title, groups in panels:
        y += 18
        parts.append(f'<text x="0" y="{y}" class="title">{title}</text>')
        y += 12
        for group in groups:
            parts += _bars(group, y)
            y += len(group.tokens_s) * (BAR + GAP) + ROW_GAP
        y += 8
    style = (
        f"text{{font:12px {FONT};fill:{theme.text}}}"
        f".title{{font-size:14px;font-weight:600}}.muted{{fill:{theme.muted}}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>", ""])


def _bars(group: Group, y: int) -> list[str]:
    """Bars of one load, scaled to the fastest engine."""
    fastest = max(group.tokens_s.values())
    middle = y + len(group.tokens_s) * (BAR + GAP) / 2 + 3
    parts = [f'<text x="{LEFT - 72}" y="{middle:g}" text-anchor="end">{group.label}</text>']
    for number, (engine, speed) in enumerate(group.tokens_s.items()):
        top = y + number * (BAR + GAP)
        length = (WIDTH - LEFT - RIGHT) * speed / fastest
        parts += [
            f'<text x="{LEFT - 6}" y="{top + 11}" text-anchor="end" class="muted">{engine}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2" '
            f'fill="{ENGINES[engine]}"/>',
            f'<text x="{LEFT + length + 5:.1f}" y="{top + 11}">{speed:,.0f}</text>',
        ]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cpu = json.loads((RESULTS / "cpu.json").read_text())
    gpu = json.loads((RESULTS / "gpu-h200-peers.json").read_text())
    panels = [
        (
            "Two CPU cores, SmolLM2-135M (pdserve and llama.cpp: 4-bit weights, vLLM: bfloat16)",
            cpu_groups(cpu),
        ),
        (
            "One NVIDIA H200, bfloat16, random weights: Qwen3-0.6B and Llama-3-8B",
            gpu_groups(gpu),
        ),
    ]
    for suffix, theme in THEMES.items():
        (folder / f"speed{suffix}.svg").write_text(svg(panels, theme))


if __name__ == "__main__":
    main()
