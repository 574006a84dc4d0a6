"""The router process: constructs its parts, serves until a signal, and drains."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.engine.handoff.recorder import EventLog, open_ring
from pdserve.engine.kv import Mixing
from pdserve.protos.common_pb2_grpc import add_BlobsServicer_to_server
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.protos.fleet_pb2_grpc import add_FleetServicer_to_server
from pdserve.protos.router_pb2_grpc import add_RouterServicer_to_server
from pdserve.services.common import lifecycle
from pdserve.services.common.auth.access import Access, make_access, make_tls
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.lifecycle import Report, run_until_signal, silent
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.process import freeze_heap
from pdserve.services.common.rate_limits import make_rate_limits
from pdserve.services.common.rpc import BLOB_CACHE_BYTES, BlobCache, BlobsServicer, read_blob
from pdserve.services.common.server import GrpcServer
from pdserve.services.common.tenants import make_keys
from pdserve.services.common.tracing import NO_TRACER, Tracer, tracing
from pdserve.services.router.core import RouterCore
from pdserve.services.router.fleet import Fleet
from pdserve.services.router.placement import Rules
from pdserve.services.router.servicer import OPEN_METHODS, FleetServicer, RouterServicer
from pdserve.services.router.settings import RouterSettings

if TYPE_CHECKING:
    from pdserve.services.common.metrics import MetricsPort

SERVICES = ("pdserve.v1.Router", "pdserve.v1.Fleet", "pdserve.v1.Blobs")
log = logging.getLogger(__name__)


class FleetBlobs:
    """Files of the served models (tokenizer, chat template, generation config) by digest. Each is
    read from any worker that has it and then cached."""

    def __init__(self, fleet: Fleet, access: Access) -> None:
        self._fleet = fleet
        self._access = access
        self._cache = BlobCache(BLOB_CACHE_BYTES)

    async def get(self, digest: str) -> bytes | None:
        """Return the model file with this digest, or None if no worker has it."""
        return await self._cache.get(digest, self._fetch)

    async def _fetch(self, digest: str) -> bytes | None:
        for address, role in self._holders(digest):
            try:
                async with self._access.open_channel(address, role) as channel:
                    return await read_blob(channel, digest)
            except (ServiceError, OSError) as error:
                log.warning(
                    "cannot read the model file with digest %s from worker %s: %s",
                    digest,
                    address,
                    error,
                )
        return None

    def _holders(self, digest: str) -> list[tuple[str, Role]]:
        """Return the address and role of each worker whose model info names a file with this
        digest."""
        holders = []
        for worker in self._fleet.workers.values():
            card = worker.hello.card
            names = (card.tokenizer_digest, card.template_digest, card.generation_config_digest)
            if digest in names:
                role = Role.DECODE if worker.role == DECODE else Role.PREFILL
                holders.append((worker.address, role))
        return holders


def make_rules(settings: RouterSettings) -> Rules:
    """Return the rules of the placement policy that the router's settings describe."""
    mixing = Mixing(settings.allow_mixed_weights, settings.allow_mixed_numerics)
    resuming = replace(mixing, numerics=mixing.numerics or not settings.exact_only)
    threshold = settings.remote_prefill_threshold
    return Rules(settings.remote_prefill, threshold, mixing=mixing, resuming=resuming)


class RouterProcess:
    """A router with its gRPC servers but without signal handling, so that tests can run it too."""

    def __init__(self, settings: RouterSettings, tracer: Tracer = NO_TRACER) -> None:
        self._settings = settings
        self._keys = make_keys(settings)
        self._access = make_access(settings)
        self._tls = make_tls(settings.tls_cert, settings.tls_key)
        self.grpc_server = GrpcServer(self._access, OPEN_METHODS, SERVICES)
        self.core = RouterCore(
            self._access,
            make_rules(settings),
            settings.max_queued,
            tracer,
            settings.prefix_index_hashes,
        )
        self._ring = open_ring(
            settings.trace_dir, "router", self.core.incarnation, settings.trace_mb
        )
        self.core.dispatcher.event_log = EventLog(self._ring)
        self._rates = make_rate_limits(settings)
        self._service = RouterServicer(
            self.core, settings, self._access, self._keys, self._rates, tracer
        )
        self.address = self.client_address = ""

    async def start(self) -> None:
        """Listen and serve. Raises OSError if an address is in use."""
        server = self.grpc_server.server
        add_RouterServicer_to_server(self._service, server)
        add_FleetServicer_to_server(FleetServicer(self.core, self._access), server)
        blobs = FleetBlobs(self.core.fleet, self._access)
        add_BlobsServicer_to_server(BlobsServicer(blobs.get), server)
        self.watching = asyncio.create_task(self._keys.watch(), name="keys")
        bind, client_bind = self._settings.bind, self._settings.client_bind
        self.address = f"{bind.rpartition(':')[0]}:{self.grpc_server.listen(bind)}"
        if client_bind:
            port = self.grpc_server.listen_for_clients(client_bind, self._tls)
            self.client_address = f"{client_bind.rpartition(':')[0]}:{port}"
        self.grpc_server.listen_for_probes(bind, self._settings.probe_port)
        await self.grpc_server.start()
        self.grpc_server.set_serving(True)

    async def drain(self) -> None:
        """Refuse new requests, end the gateways' sessions at once, and wait for calls of Generate
        to end. The gateways' requests keep running at the decode workers, and another router
        resumes them; calls of Generate cannot move to another router."""
        self.core.stop_taking()
        self._service.send_away()
        await self.core.drain()

    async def stop(self, grace_s: float) -> None:
        """End the sessions and calls of clients first, within `grace_s` seconds, then the sessions
        with workers."""
        self.watching.cancel()
        await self.grpc_server.stop(grace_s)
        await self._rates.close()
        await self.core.close()
        if self._ring is not None:
            self._ring.close()


async def serve(
    settings: RouterSettings,
    report: Report,
    on_loaded: Callable[[], None] = lambda: None,
    tracer: Tracer = NO_TRACER,
) -> int:
    """Run a router until a signal. Returns the exit code. `on_loaded` is called when all modules
    are loaded, before the router listens."""
    router = RouterProcess(settings, tracer)
    on_loaded()
    try:
        await router.start()
    except OSError:
        await router.core.close()
        raise
    metrics = _serve_metrics(router, settings)
    report("listening", {"address": router.address, "clients": router.client_address})
    report("ready", {})
    try:
        return await run_until_signal(
            set_serving=router.grpc_server.set_serving,
            drain=router.drain,
            stop=router.stop,
            drain_s=settings.drain_s,
            failed=(router.core.ticker, router.watching),
        )
    finally:
        if metrics is not None:
            await metrics.close()


def _serve_metrics(router: RouterProcess, settings: RouterSettings) -> "MetricsPort | None":
    if not settings.metrics_port:
        return None
    from pdserve.services.common.metrics import MetricsPort
    from pdserve.services.router.metrics import RouterMetrics

    collector = RouterMetrics(router.core)
    return MetricsPort(settings, settings.bind, settings.tls_cert, collector)


def run(settings: RouterSettings, report: Report = silent) -> int:
    """Run a router process until a signal. Returns the exit code. Raises OSError if an address is
    in use, and ValueError for settings that cannot work."""
    configure_logging("router", settings.log_level, log_format=settings.log_format)
    with tracing("router", settings) as tracer:
        return lifecycle.run(serve(settings, report, freeze_heap, tracer))
