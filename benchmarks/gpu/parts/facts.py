"""Facts about the GPU: its type, its copy and multiply rates, whether its events cross
processes."""

import platform
import subprocess
import sys

import torch
import triton
from clock import seconds_of
from part import MeasuredPart, run

CHILD = """
import sys, torch
handle = bytes.fromhex(sys.stdin.readline())
event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)
torch.ones(1, device="cuda")
event.record()
event.synchronize()
print("recorded", flush=True)
"""


def measure(part: MeasuredPart) -> None:
    part.note(torch=torch.__version__, triton=triton.__version__, python=platform.python_version())
    if part.fake:
        part.note(device="fake")
    else:
        card = torch.cuda.get_device_properties(0)
        part.note(
            device=card.name,
            capability=f"{card.major}.{card.minor}",
            memory_gib=round(card.total_memory / 2**30, 1),
            processors=card.multi_processor_count,
            cuda=torch.version.cuda,
            driver=driver(),
        )
    values = 1 << (16 if part.fake else 31)  # bytes
    source = torch.ones(values, dtype=torch.uint8, device=part.device)
    target = torch.empty_like(source)
    seconds = seconds_of(part.device, lambda: target.copy_(source))
    part.note(copy_gb_s=2 * values / seconds / 1e9)  # read and written
    part.note(copy_is_equal=torch.equal(source, target))
    size = 64 if part.fake else 8192
    a, b = (torch.randn(size, size, device=part.device).bfloat16() for _ in range(2))
    seconds = seconds_of(part.device, lambda: a @ b, 50)
    part.note(mm_tflop_s=2 * size**3 / seconds / 1e12)
    if part.fake:
        part.skip("ipc_events", "the fake device's events are tried by the hand-off")
    else:
        ipc_events(part)


def driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except OSError:
        return "unknown: no nvidia-smi"


def ipc_events(part: MeasuredPart) -> None:
    """Let another process open an event of this one and record it."""
    event = torch.cuda.Event(enable_timing=False, interprocess=True)
    event.record()
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, input=event.ipc_handle().hex() + "\n", text=True, capture_output=True, timeout=60
    )
    works = done.stdout == "recorded\n" and event.query()
    if not works:
        part.note(ipc_events_error=done.stderr[-500:])
    part.note(ipc_events=works)


if __name__ == "__main__":
    run(measure)
