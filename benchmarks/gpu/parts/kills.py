"""SIGKILL of either side in the middle of copies: no wrong byte, the survivor can compute, windows
are returned. Without MPS, and, in a separate process, with it."""

import contextlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from part import MeasuredPart, run
from sides import READY, Children, Side, Taker, dial, listen, pieces, push, tell

FEW = 8  # blocks of the pools of processes that are killed
KILLS = 40  # for each side
DAEMON = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
WITH_MPS = "with MPS"


def measure(part: MeasuredPart) -> None:
    count = 1 if part.fake else KILLS
    side = Side(part.fake, str(part.folder), FEW)
    part.note(prefill_kills=kill_prefill(side, count))
    part.note(decode_kills=kill_decode(side, count))
    part.note(context_alive=side.alive())
    if PIPES in os.environ:
        return
    if part.fake:
        part.skip(WITH_MPS, "a fake device has no MPS")
    elif not shutil.which(DAEMON):
        part.skip(WITH_MPS, f"{DAEMON} is not installed")
    else:
        with_mps(part)


def with_mps(part: MeasuredPart) -> None:
    """The same in processes that share the GPU through MPS."""
    folder = part.folder / "mps"
    folder.mkdir(exist_ok=True)
    env = os.environ | {PIPES: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run([DAEMON, "-d"], env=env, capture_output=True, text=True, timeout=20)
    if started.returncode:
        part.skip(WITH_MPS, f"{DAEMON} did not start: {(started.stdout + started.stderr)[-200:]}")
        return
    try:
        subprocess.run(
            [sys.executable, __file__, "--folder", folder, "--seconds", str(part.left_s)],
            env=env,
            timeout=max(1.0, part.left_s - 5),
        )
        part.note(with_mps=json.loads((folder / "kills.json").read_text()))
    except (OSError, subprocess.TimeoutExpired) as error:
        part.note(with_mps={"error": f"{type(error).__name__}: {error}"[:500]})
    finally:
        subprocess.run([DAEMON], input="quit -t 5\n", text=True, env=env, timeout=30)


def over(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def kill_prefill(side: Side, count: int) -> dict[str, int]:
    """prefill floods the window and dies; decode's context still works, and the data it took equals
    the dead process's pool."""
    incarnation, taker, rng = os.urandom(16), Taker(side), random.Random(2)
    listener = listen(side, "cuda_ipc", incarnation, taker)
    children = Children(side, "prefill", FEW, READY)
    survived = frames = damaged = wrong = 0
    for number in range(count):
        process, _ = children.next(count - number - 1)
        tell(process, "cuda_ipc", "-", incarnation.hex(), number, "flood")
        try:
            taken, bad = taker.take(rng.randrange(1, 40))
        except AssertionError as error:
            sender = "the sender lives" if process.poll() is None else "the sender has ended"
            raise AssertionError(f"{error}, after {number} kills; {sender}") from error
        process.kill()
        process.communicate()
        ended = over(lambda n=number: len(taker.links) > n and all(x.ended for x in taker.links))
        with contextlib.suppress(queue.Empty):
            while True:
                taker.arrived.get_nowait()  # of the dead process
        wrong += wrong_blocks(side, taker, number)
        frames, damaged = frames + taken, damaged + bad
        survived += side.alive() and ended and not bad
    children.close()
    listener.close()
    return {"kills": count, "survived": survived, "frames": frames, "damaged": damaged} | {
        "wrong_blocks": wrong,
        "windows": side.num_windows,
    }


def wrong_blocks(side: Side, taker: Taker, seed: int) -> int:
    """The wrong blocks among those taken."""
    expected, pool = side.filled(seed, FEW), side.pools[0]
    covered, taker.covered = taker.covered, set()
    return sum(not side.equal(pool[n, block], expected[n, block]) for n, block in covered)


def kill_decode(side: Side, count: int) -> dict[str, int]:
    """decode takes frames and dies with its window; prefill's context still works."""
    rng = random.Random(3)
    children = Children(side, "decode", FEW, READY)
    survived = frames = 0
    for number in range(count):
        process, incarnation = children.next(count - number - 1)
        link = dial(side, "cuda_ipc", "", bytes.fromhex(incarnation))
        few = pieces(side, link, FEW)
        for sequence in range(60):
            push(side, link, few[sequence % len(few)], sequence)
        for _ in range(rng.randrange(1, 30)):
            assert process.stdout is not None
            frames += process.stdout.readline() == "frame\n"
        process.kill()
        process.communicate()
        ended = over(lambda link=link: link.ended)
        link.close()
        survived += side.alive() and ended
    children.close()
    return {"kills": count, "survived": survived, "frames": frames}


if __name__ == "__main__":
    run(measure)
