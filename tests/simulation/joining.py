"""A worker's lease at its routers without threads: the same messages at the same times."""

import asyncio
from typing import Any

import grpc

from pdserve.protos import fleet_pb2 as pb
from pdserve.protos.fleet_pb2_grpc import FleetStub
from pdserve.services.worker.membership import (
    REJOIN_S,
    RESOLVE_S,
    SILENT_S,
    Membership,
    _Lease,
)
from simulation.clock import here
from simulation.network import Network
from simulation.rpc import Channel


class LoopLease(_Lease):
    """One join stream as a task."""

    network: Network

    def start(self, prefixes: list[pb.PrefixEvents], load: pb.Load | None) -> None:
        self._pending_reports.add_prefixes(prefixes)
        if load is not None:
            self._pending_reports.add_load(load)
        self._changed = asyncio.Event()
        self._heard = here().time()
        self._over = False
        self._task = here().create_task(self._hold(), name=f"join {self.address}")

    def alive(self) -> bool:
        return not self._over

    def load(self, load: pb.Load) -> None:
        super().load(load)
        self._changed.set()

    def prefixes(self, events: list[pb.PrefixEvents]) -> None:
        super().prefixes(events)
        self._changed.set()

    def announce_drain(self, reason: str) -> None:
        super().announce_drain(reason)
        if hasattr(self, "_changed"):  # otherwise it has not started
            self._changed.set()

    def close(self) -> None:
        self._task.cancel()

    async def _hold(self) -> None:
        async with Channel(self.network, self.address) as channel:
            call = FleetStub(channel).Join()
            reader = here().create_task(self._read(call), name="join echo")
            try:
                await call.write(pb.WorkerReport(hello=self._owner.hello))
                await self._report(call, reader)
            except grpc.aio.AioRpcError:
                pass
            finally:
                self._over = True
                reader.cancel()
                self._owner.lease_ended()

    async def _read(self, call: Any) -> None:
        try:
            async for _ in call:
                self._heard = here().time()
        except grpc.aio.AioRpcError:
            pass
        self._changed.set()

    async def _report(self, call: Any, reader: Any) -> None:
        while not reader.done():
            self._changed.clear()
            now = here().time()
            if now - self._heard > SILENT_S:
                return
            for report in self._pending_reports.due(now):
                await call.write(report)
            timer = here().call_at(self._pending_reports.next_due(), self._changed.set)
            await self._changed.wait()
            timer.cancel()


class LoopMembership(Membership):
    """Joins the routers in a task."""

    def start(self) -> None:
        self._wake = asyncio.Event()
        self._task = here().create_task(self._keep(), name="membership")

    async def _keep(self) -> None:
        while True:
            self._leases = {a: x for a, x in self._leases.items() if x.alive()}
            for address in self._discovery.look():  # targets are addresses
                if address not in self._leases:
                    self._leases[address] = self._new_lease(address)
            self._wake.clear()
            timer = here().call_later(RESOLVE_S, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            await asyncio.sleep(REJOIN_S)

    def lease_ended(self) -> None:
        self._wake.set()

    def close(self, timeout_s: float = 0.0) -> None:
        self._task.cancel()
        for lease in self._leases.values():
            lease.close()
