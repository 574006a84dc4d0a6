"""Line 3: one trace has the spans of gateway, router, prefill and decode in order, their phases add
up to the client's time to first token within 2 ms, and an unreachable collector costs nothing.

Every request has a remote prefill. Each phase is compared with the span of its process. "return" is
a remainder: it is compared with the ways between the spans, and bounded. The part of the client's
time outside the phases is the way from the client into the gateway and its first token's way back,
which a fully loaded machine may delay: the median counts. An unreachable collector is compared with
no tracing at all, in systems that are restarted for each round.
"""

import json
import statistics
import time
from typing import Any

import psutil
from fakes.otlp_collector import OtlpCollector
from systems.fleet import Fleet
from systems.traced_requests import TracedClient, check_spans

FAR = ("--prefill", "1", "--remote-prefill", "always", "--kv-tokens", "8192")
GONE = ("--otlp-traces-endpoint", "http://127.0.0.1:1")  # no process listens there
REQUESTS, WITHIN_MS = 60, 2.0
MOST_RETURN_MS = 6.0  # for three ways between processes, in the median
ROUNDS, GONE_REQUESTS = 2, 60
MOST_SLOWER = 1.1  # noise of a time to first token between two starts
MOST_GROWN_MB, MOST_STOP_S = 8.0, 1.5
ROLES = ("gateway", "router", "prefill", "decode")


def phases() -> dict[str, Any]:
    """The differences between the sums and the client's times, in milliseconds."""
    with (
        OtlpCollector() as collector,
        Fleet(*FAR, "--otlp-traces-endpoint", collector.url) as fleet,
    ):
        with TracedClient(fleet.url) as client:
            client.ask("warm up " * 40)
            answers = [client.ask(f"{n} one two three " * 40) for n in range(REQUESTS)]
            ways = [check_spans(collector, answer) for answer in answers]
        num_spans = len(collector.spans)
    rests = [answer.ttft_ms - answer.phases_ms for answer in answers]
    between = statistics.median(way.total for way in ways)
    return {
        "ok": abs(statistics.median(rests)) <= WITHIN_MS
        and min(rests) > -0.5
        and between <= MOST_RETURN_MS,
        "rest_ms": _spread(rests),
        "return_ms": _spread([way.total for way in ways]),
        "to_router_ms": _spread([way.to_router for way in ways]),
        "to_decode_ms": _spread([way.to_decode for way in ways]),
        "back_ms": _spread([way.back for way in ways]),
        "ttft_ms": statistics.median(answer.ttft_ms for answer in answers),
        "requests": REQUESTS,
        "spans": num_spans,
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "least": ordered[0],
        "p50": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "most": ordered[-1],
    }


def gone() -> dict[str, Any]:
    """An unreachable collector against no tracing: times to first token, memory, the log and the
    stop."""
    pairs = [(_run(), _run(*GONE)) for _ in range(ROUNDS)]
    ratio = statistics.median(b["ttft_ms"] for _, b in pairs) / statistics.median(
        a["ttft_ms"] for a, _ in pairs
    )
    stop_s = max(b["stop_s"] - a["stop_s"] for a, b in pairs)
    grown = max(b["grown_mb"] for _, b in pairs)
    warnings = [b["warnings"] for _, b in pairs]
    ok = ratio <= MOST_SLOWER and stop_s <= MOST_STOP_S and grown <= MOST_GROWN_MB
    return {
        "ok": ok and set(warnings) == {len(ROLES)},
        "ttft_ratio": ratio,
        "later_stop_s": stop_s,
        "grown_mb": grown,
        "warnings": warnings,
    }


def _run(*options: str) -> dict[str, Any]:
    with Fleet(*FAR, *options) as fleet:
        with TracedClient(fleet.url) as client:
            for n in range(20):
                client.ask(f"{n} warm up " * 20)
            before = _rss_mb(fleet)
            answers = [client.ask(f"{n} one two three " * 40) for n in range(GONE_REQUESTS)]
            grown = max(after - old for after, old in zip(_rss_mb(fleet), before, strict=True))
        began = time.monotonic()
    assert fleet.exit_code == 0
    return {
        "ttft_ms": statistics.median(answer.ttft_ms for answer in answers),
        "grown_mb": grown,
        "stop_s": time.monotonic() - began,
        "warnings": fleet.final_log.count("does not accept traces"),
    }


def _rss_mb(fleet: Fleet) -> list[float]:
    """Memory of gateway and router, which hold no KV."""
    pids = [pid for role in ROLES[:2] for pid in fleet.pids(role)]
    return [psutil.Process(pid).memory_info().rss / 1e6 for pid in pids]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    found = {"phases": phases(), "gone": gone()}
    print(json.dumps(_rounded({"ok": all(part["ok"] for part in found.values()), **found})))


if __name__ == "__main__":
    main()
