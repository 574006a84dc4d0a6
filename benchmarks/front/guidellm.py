"""The figures of `pdserve bench` relative to guidellm's on the same load, in closed and open loops.

Both measure one server alternately, with prompts of the same length that neither has sent before. A
step of its model takes a fixed time and no processor, so that figures differ only by the method of
measurement: with the shipped model, on the cores that the clients use, they were 2 to 7 % apart.
guidellm is installed into build/guidellm the first time.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from front.fast_decode import MODEL
from front.fast_system import FastSystem
from prometheus_client.parser import text_string_to_metric_families
from systems.eventually import wait_until

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.bench import make_prompts
from pdserve.cli.options import ClientSettings

ROOT = Path(__file__).parents[2]
GUIDELLM = "guidellm==0.8.1"
ENVIRONMENT = ROOT / "build/guidellm"
STEP_S, CHUNK_S = 0.006, 0.12  # about the time of the shipped model
INPUT, OUTPUT = 128, 48
REQUESTS = 60
LOADS = {"one": {"concurrency": 1}, "closed": {"concurrency": 2}, "open": {"rate": 2.0}}
ROUNDS = 2
PDSERVE = (sys.executable, "-P", "-m", "pdserve.cli.main")
LIMIT_S = 1200.0
OTHERS = 1_000_000  # beyond the seeds of the prompts of `pdserve bench`
DONE = ("stop", "length")
TTFT, SERVER = "vllm:time_to_first_token_seconds", "server_ttft_ms"
FIGURES = ("output_tokens_per_s", "ttft_ms", SERVER, "tpot_ms", "e2e_ms")
TRIES = 3  # per run of guidellm


def guidellm() -> Path:
    """The guidellm command, in an environment that also sees the packages installed here."""
    command = ENVIRONMENT / "bin/guidellm"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        seen = ENVIRONMENT / "lib" / version / "site-packages/seen.pth"
        seen.write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(ENVIRONMENT / "bin/pip"), "install", "-q", GUIDELLM]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return command


def prompts_file(url: str, folder: Path, seed: int) -> Path:
    """Prompts for one run of guidellm."""

    async def make() -> list[str]:
        api = AsyncApi(ClientSettings(url=url))
        try:
            prompts, exact = await make_prompts(api, MODEL, REQUESTS, INPUT, seed)
            assert exact
            return prompts
        finally:
            api.close()

    path = folder / "prompts.jsonl"
    lines = [{"prompt": prompt, "output_tokens_count": OUTPUT} for prompt in asyncio.run(make())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def counted(url: str, name: str, **labels: Collection[str]) -> float:
    """A figure of the server, summed over the samples whose labels are among these."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and all(sample.labels[key] in of for key, of in labels.items())
    )


def num_answered(url: str) -> int:
    """The number of answers that the server counts as complete."""
    return int(counted(url, "vllm:request_success_total", finished_reason=DONE))


def beside_the_server(
    measure_it: Callable[..., dict[str, float]], url: str, *words: Any
) -> dict[str, float]:
    """The client's figures, and the TTFT measured by the server in the same time."""
    before = [counted(url, f"{TTFT}_{part}") for part in ("sum", "count")]
    found = measure_it(url, *words)
    after = [counted(url, f"{TTFT}_{part}") for part in ("sum", "count")]
    seconds, count = (b - a for a, b in zip(before, after, strict=True))
    return {**found, SERVER: 1000 * seconds / count}


def theirs(url: str, load: Mapping[str, float], folder: Path, seed: int) -> dict[str, float]:
    """The figures of guidellm. Its ITL is usually called TPOT.

    Occasionally it counts one request fewer than the server, none of them as failed. Such a run is
    repeated with other prompts; "miscounted" says how often.
    """
    for attempt in range(TRIES):
        before = num_answered(url)
        prompts = prompts_file(url, folder, seed + (attempt + 1) * OTHERS)
        if (found := _theirs(url, load, folder, seed, prompts)) is not None:
            return {**found, "miscounted": attempt}
        wait_until(lambda before=before: num_answered(url) - before == REQUESTS, "answers", 10.0)
    raise RuntimeError(f"guidellm has miscounted {TRIES} times")


def _theirs(
    url: str, load: Mapping[str, float], folder: Path, seed: int, prompts: Path
) -> dict[str, float] | None:
    """The figures of one run, or None if not all requests were counted."""
    out = folder / "guidellm.json"
    if rate := load.get("rate"):
        profile = f"kind=poisson,rate={rate:g}"
    else:
        profile = f"kind=concurrent,streams={load['concurrency']:g}"
    words: list[str] = [
        str(guidellm()), "run",
        "--backend", f"kind=openai_http,target={url},model={MODEL},http2=false,"
        "request_format=/v1/completions,validate_backend=false",
        "--profile", profile,
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=json_file,path={prompts}",
        "--seed", f"kind=static,value={seed}",
        "--output", f"kind=json,path={out}",
        "--disable-console",
    ]  # fmt: skip
    # One process draws one series of arrivals, the same as `pdserve bench` with this seed.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    subprocess.run(words, check=True, stdout=sys.stderr, env=env, timeout=LIMIT_S)
    (found,) = json.loads(out.read_text())["benchmarks"]
    out.unlink()
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    if totals["successful"] != REQUESTS:
        assert (totals["successful"], totals["errored"]) == (REQUESTS - 1, 0), totals
        return None
    requests = found["requests"]["successful"]
    begin = min(request["request_start_time"] for request in requests)
    end = max(request["request_end_time"] for request in requests)
    return {
        "output_tokens_per_s": sum(r["output_tokens"] for r in requests) / (end - begin),
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "e2e_ms": metrics["request_latency"]["successful"]["mean"] * 1000,
    }


def ours(url: str, load: Mapping[str, float], folder: Path, seed: int) -> dict[str, float]:
    """The figures of `pdserve bench`."""
    out = folder / "ours.json"
    words = [
        *PDSERVE,
        "bench",
        "--url",
        url,
        "--requests",
        str(REQUESTS),
        "--random-seed",
        str(seed),
    ]
    words += ["--input-tokens", str(INPUT), "--output-tokens", str(OUTPUT), "--json", str(out)]
    words += ["--warmup", "0"]
    for name, value in load.items():
        words += [f"--{name}", f"{value:g}"]
    subprocess.run(words, check=True, stdout=sys.stderr, timeout=LIMIT_S)
    found = json.loads(out.read_text())
    assert found["completed"] == REQUESTS
    assert found["prompt_tokens"] == REQUESTS * INPUT
    return {
        "output_tokens_per_s": found["output_tokens_per_s"],
        **{name: found[name]["mean"] for name in ("ttft_ms", "tpot_ms", "e2e_ms")},
    }


def agreement(url: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Compare each load in rounds of alternating order; a figure is the median of its rounds, and
    the difference that of each round's ratio.

    A TTFT is compared as a multiple of the server's in the same run, which would differ if one
    client sent requests at other times.
    """
    result = {}
    seed = miscounted = 0
    for name, load in LOADS.items():
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
        for number in range(rounds):
            order = [("ours", ours), ("theirs", theirs)]
            seed += 1
            for who, measure_it in order if number % 2 else reversed(order):
                runs[who].append(beside_the_server(measure_it, url, load, folder, seed))
        result[name] = compared(runs["ours"], runs["theirs"])
        miscounted += sum(int(run["miscounted"]) for run in runs["theirs"])
    return {"miscounted": miscounted, "loads": result}


def compared(
    mine: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    figures = {}
    for name in FIGURES:
        a, b = (statistics.median(run[name] for run in runs) for runs in (mine, others))
        figures[name] = {"ours": round(a, 2), "theirs": round(b, 2)}
        if name != SERVER:
            pairs = zip(mine, others, strict=True)
            ratios = [
                one[name] / other[name] * (other[SERVER] / one[SERVER] if name == "ttft_ms" else 1)
                for one, other in pairs
            ]
            figures[name]["apart"] = round(statistics.median(ratios) - 1, 4)
    return figures


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    guidellm()
    with TemporaryDirectory() as folder, FastSystem(STEP_S, CHUNK_S) as system:
        found = agreement(f"http://{system.http}", Path(folder), rounds)
    figures = [figure for load in found["loads"].values() for figure in load.values()]
    apart = [figure["apart"] for figure in figures if "apart" in figure]
    return {"furthest_apart": max(apart, key=abs), "rounds": rounds, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(json.dumps(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
