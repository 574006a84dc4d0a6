"""One trace over HTTP, gRPC and a KV transfer; long form: benchmarks/front/line3_traces.py."""

import os
import time
from collections.abc import Iterator

import pytest
from eventually import wait_until
from fleet import Fleet
from otlp_collector import OtlpCollector
from traced_requests import TracedClient, check_spans

PARENT_ID = "b7ad6b7169203331"
FAR = ("--prefill", "1", "--remote-prefill", "always", "--kv-tokens", "4096")
TRIES = 40  # of a machine that has other things to do
GONE = "http://127.0.0.1:1"  # nobody listens there


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(collector: OtlpCollector) -> Iterator[Fleet]:
    with Fleet(*FAR, "--otlp-traces-endpoint", collector.url) as fleet:
        yield fleet


def test_the_spans_of_four_processes(fleet: Fleet, collector: OtlpCollector) -> None:
    with TracedClient(fleet.url) as client:
        trace = os.urandom(16).hex()
        parent = f"00-{trace}-{PARENT_ID}-01"
        answer = client.ask("one two three " * 40, traceparent=parent, tracestate="a=b")
        assert answer.trace_id == answer.trace["trace_id"] == trace
        assert answer.trace["transport"] in ("shm", "tcp")
        check_spans(collector, answer, PARENT_ID)
        assert {span.trace_state for span in collector.spans} == {"a=b"}
        own = client.ask("four five six " * 40)
        check_spans(collector, own)
        unsampled = client.ask("seven " * 40, traceparent=f"{parent[:-2]}00")
        assert unsampled.traceparent[-2:] == "00"
        kept = client.ask("eight " * 40)
        check_spans(collector, kept)
        assert unsampled.trace["trace_id"] not in {s.trace_id for s in collector.spans} - {trace}


def test_the_phases_sum_to_the_clients_time_to_first_token(fleet: Fleet) -> None:
    """Within 2 ms, once nothing else has the cores; never are they longer."""
    with TracedClient(fleet.url) as client:
        rests = []
        for number in range(TRIES):
            answer = client.ask(f"{number} one two three " * 20)
            rests.append(answer.ttft_ms - answer.phases_ms)
            if abs(rests[-1]) <= 2:
                break
    assert abs(rests[-1]) <= 2, rests
    assert min(rests) > -1, rests


def test_a_collector_that_is_gone() -> None:
    """Requests are answered, each process says so once, and none waits for it at its end."""
    with Fleet(*FAR, "--otlp-traces-endpoint", GONE) as fleet:
        with TracedClient(fleet.url) as client:
            for number in range(4):
                assert client.ask(f"{number} one two three " * 20).traceparent
            wait_until(lambda: fleet.log().count("takes no traces") == 4, "each has tried")
            for number in range(4):
                assert client.ask(f"{number} four five six " * 20).traceparent
        began = time.monotonic()
    assert fleet.exit_code == 0
    assert time.monotonic() - began < 20
    warned = [line for line in fleet.final_log.splitlines() if "takes no traces" in line]
    assert len(warned) == 4, fleet.final_log
    assert "Traceback" not in fleet.final_log
