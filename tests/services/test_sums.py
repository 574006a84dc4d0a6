"""Three gateways, two routers and three workers, each scraped separately: sums are correct."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.engine_kit import fake_engine
from fakes.router import tokenizer_json
from prometheus_client.parser import text_string_to_metric_families
from systems.cluster_secret import ACCESS, SECRET
from systems.eventually import eventually
from systems.watched import THRESHOLD, WatchedGateway, page_of, router_page, watched_gateway
from systems.worker_kit import CARD, start_worker

from pdserve.engine.api import EngineConfig
from pdserve.gateway.router_client import RouterClient
from pdserve.services.decode.servicer import DecodeRole
from pdserve.services.prefill.servicer import PrefillRole
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.metrics import WorkerMetrics
from pdserve.services.worker.process import WorkerProcess
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings

pytestmark = pytest.mark.anyio
OBSERVABILITY = Path(__file__).parents[2] / "k8s/observability"
GATEWAYS, ROUTERS, DECODES, REQUESTS, TOKENS, BLOCKS = 3, 2, 2, 12, 5, 256


@dataclass
class System:
    gateways: list[WatchedGateway]
    routers: list[RouterProcess]
    workers: dict[str, list[WorkerProcess]]

    async def pages(self, **query: str) -> dict[str, list[str]]:
        """Return the pages by job, as Prometheus would scrape them."""
        found = {role: [await _page(w) for w in them] for role, them in self.workers.items()}
        return {
            "pdserve-gateway": [await gateway.page(**query) for gateway in self.gateways],
            "pdserve-router": [router_page(router.core) for router in self.routers],
            **{f"pdserve-{role}": pages for role, pages in found.items()},
        }


async def _page(worker: WorkerProcess) -> str:
    """Return the current metrics page of a worker's engine."""
    runtime: Any = worker.runtime
    load, _, _ = await asyncio.wrap_future(runtime.thread.post(lambda _: runtime.snapshot()))
    metrics = WorkerMetrics(runtime.hello)
    metrics.load = load
    return page_of(metrics)


@pytest.fixture
async def system(anyio_backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    card = replace(CARD, tokenizer_json=tokenizer_json())
    monkeypatch.setattr(
        "pdserve.services.worker.process.build_engine",
        lambda config, progress: (fake_engine(num_blocks=BLOCKS), card),
    )
    async with AsyncExitStack() as stack:
        routers = []
        for _ in range(ROUTERS):
            settings = RouterSettings(cluster_secret=(SECRET,), remote_prefill_threshold=THRESHOLD)
            routers.append(router := RouterProcess(settings))
            await router.start()
            stack.push_async_callback(router.stop, 0)
        addresses = tuple(router.address for router in routers)
        common: dict[str, Any] = {
            "cluster_secret": (SECRET,),
            "routers": addresses,
            "kv_transport": "tcp",
            "shm_dir": str(tmp_path),
        }
        workers: dict[str, list[WorkerProcess]] = {"decode": [], "prefill": []}
        for role in ("decode", "decode", "prefill"):
            decodes = role == "decode"
            chosen: Any = (DecodeSettings if decodes else PrefillSettings)(**common)
            made: Any = (DecodeRole if decodes else PrefillRole)(chosen, EngineConfig())
            workers[role].append(worker := await start_worker(chosen, made))
            stack.push_async_callback(worker.stop, 0.2)
        gateways = []
        for number in range(GATEWAYS):
            client = RouterClient(list(addresses), ACCESS, bytes([number]) * 16)
            await client.start()
            stack.push_async_callback(client.close)
            await eventually(lambda client=client: client.num_connected == ROUTERS)
            gateways.append(await stack.enter_async_context(watched_gateway(client)))
        await eventually(lambda: all(_knows_all(router) for router in routers))
        yield System(gateways, routers, workers)


def _knows_all(router: RouterProcess) -> bool:
    workers = router.core.fleet.workers.values()
    return sum(worker.connected for worker in workers) == DECODES + 1


def dropped() -> dict[str, re.Pattern[str]]:
    """Return by job the samples that Prometheus is configured to drop."""
    jobs = yaml.safe_load((OBSERVABILITY / "compose/prometheus.yml").read_text())["scrape_configs"]
    return {
        job["job_name"]: re.compile(one["regex"])
        for job in jobs
        for one in job.get("metric_relabel_configs", ())
        if one["action"] == "drop" and one["source_labels"] == ["__name__"]
    }


def values(pages: Mapping[str, list[str]], name: str, **labels: str) -> list[float]:
    """Return the values of all scraped samples with this name and these labels."""
    drops = dropped()
    return [
        sample.value
        for job, of_job in pages.items()
        if not (job in drops and drops[job].fullmatch(name))
        for page in of_job
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


async def test_sums_over_all_processes_equal_those_of_the_system(system: System) -> None:
    for number in range(REQUESTS):
        gateway = system.gateways[number % GATEWAYS]
        prompt = [(number + n) % 60 for n in range(2 * THRESHOLD)]
        assert await gateway.ask(1, prompt, TOKENS) == [200]
    pages = await system.pages()
    for name, labels, total in (
        ("vllm:e2e_request_latency_seconds_count", {}, REQUESTS),
        ("vllm:generation_tokens_total", {}, REQUESTS * TOKENS),
        ("vllm:prompt_tokens_total", {}, REQUESTS * 2 * THRESHOLD),
        ("pdserve_request_transfer_time_seconds_count", {}, REQUESTS),
        ("pdserve_router_ended_total", {"outcome": "ok"}, REQUESTS),
        ("pdserve_router_prefills_total", {"where": "remote"}, REQUESTS),
        ("pdserve_router_queue_seconds_count", {}, REQUESTS),
        ("pdserve_router_queued", {}, 0),
        ("pdserve_kv_blocks", {"state": "total"}, (DECODES + 1) * BLOCKS),
        ("pdserve_kv_blocks", {"state": "used"}, 0),
        ("vllm:num_requests_running", {}, 0),
    ):
        assert sum(values(pages, name, **labels)) == total, (name, labels)
    sent, verified = (
        sum(values({job: pages[job]}, "pdserve_transfer_bytes_total"))
        for job in ("pdserve-prefill", "pdserve-decode")
    )
    assert sent == verified > 0
    states = {"role": "decode", "state": "live"}
    views = values(pages, "pdserve_router_workers", **states)
    assert views == [DECODES] * ROUTERS, "each router has all of them: max, not sum"
    ratios = values(pages, "pdserve_decode_kv_used_ratio")
    assert len(ratios) == ROUTERS
    # Samples that gateways with metrics of the fleet would count twice.
    again = await system.pages(fleet="true")
    total = (DECODES + 1) * BLOCKS
    counted = sum(values(again, "pdserve_kv_blocks", state="total"))
    assert counted == (1 + GATEWAYS) * total
