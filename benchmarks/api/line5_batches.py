"""Line 5: a batch of 1,000 lines survives kill -9 of the gateway three times, with no line lost or
written twice, and in the order of the input."""

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import psutil
from systems.eventually import wait_until
from systems.fleet import Fleet

LINES = 1000
KILLS = (0.1, 0.4, 0.7)  # shares of the lines that are answered when the gateway is killed
LIMIT_S = 3600.0
ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def free_port() -> int:
    """A free port, so that the gateway restarts at the address its client uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def requests(model: str, count: int) -> bytes:
    """The lines of the input."""
    lines = []
    for number in range(count):
        words = f"Say the number {number} and a word that rhymes with it."
        body = {
            "model": model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 8,
            "temperature": 0,
        }
        line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        lines.append(json.dumps(line).encode() + b"\n")
    return b"".join(lines)


def gateway_of(fleet: Fleet) -> int:
    """The gateway process itself, without its text processes."""
    pids = fleet.pids("gateway")
    (found,) = (pid for pid in pids if psutil.Process(pid).ppid() not in pids)
    return found


def kill(fleet: Fleet, client: openai.OpenAI, batch_id: str, at_least: int) -> int:
    """Kill the gateway once this many lines are answered; returns the number answered."""

    def answered() -> int:
        batch = client.batches.retrieve(batch_id)
        assert batch.status in ("validating", "in_progress"), batch.status
        assert batch.request_counts is not None
        done = batch.request_counts.completed
        return done if done >= at_least else 0

    done = int(wait_until(answered, "lines", LIMIT_S, pause_s=0.05))
    old = gateway_of(fleet)
    os.kill(old, signal.SIGKILL)

    def back() -> bool:
        try:
            return client.with_options(timeout=5).batches.retrieve(batch_id).id == batch_id
        except openai.APIError:
            return False

    wait_until(back, "the gateway", LIMIT_S)
    assert gateway_of(fleet) != old
    return done


def measure(count: int = LINES) -> dict[str, Any]:
    """The figures for a batch of this many lines."""
    port = free_port()
    with TemporaryDirectory() as folder:
        database = f"sqlite:///{Path(folder) / 'gateway.db'}"
        options = ("--prefill", "0", "--port", str(port), "--database-url", database)
        with (
            Fleet(*options) as fleet,
            openai.OpenAI(api_key="none", base_url=f"{fleet.url}/v1") as client,
        ):
            model = client.models.list().data[0].id
            data = requests(model, count)
            file = client.files.create(file=("in.jsonl", data), purpose="batch")
            started = time.monotonic()
            batch = client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
            )
            kills = [kill(fleet, client, batch.id, int(count * share)) for share in KILLS]

            def ended() -> Any:
                found = client.batches.retrieve(batch.id)
                return found if found.status in ENDED else None

            batch = wait_until(ended, "the end of the batch", LIMIT_S, pause_s=0.2)
            took_s = time.monotonic() - started
            lines = []
            if batch.output_file_id:
                text = client.files.content(batch.output_file_id).text
                lines = [json.loads(line) for line in text.splitlines()]
    ids = [line["custom_id"] for line in lines]
    wanted = [f"line-{number}" for number in range(count)]
    twice = sum(times - 1 for times in Counter(ids).values())
    answered = sum(line["response"]["status_code"] == 200 for line in lines)
    in_the_middle = all(0 < done < count for done in kills)
    return {
        "ok": ids == wanted and answered == count and batch.status == "completed" and in_the_middle,
        "status": batch.status,
        "lines": count,
        "answered": answered,
        "lost": len(set(wanted) - set(ids)),
        "twice": twice,
        "in_order": ids == wanted,
        "answered_at_kills": kills,
        "seconds_of_batch": round(took_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=LINES)
    figures = measure(parser.parse_args().lines)
    print(json.dumps(figures))
    return not figures["ok"]


if __name__ == "__main__":
    sys.exit(main())
