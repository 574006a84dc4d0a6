"""The ExternalProcessor service: one Exchange for each HTTP request of a proxy."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from pdserve.protos import ext_proc_pb2 as pb
from pdserve.protos.ext_proc_pb2_grpc import ExternalProcessorServicer
from pdserve.services.picker.exchange import Exchange
from pdserve.services.picker.metrics import PickerMetrics

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = f"/{SERVICE}/Process"
Context = grpc.aio.ServicerContext[Any, Any]


class PickerServicer(ExternalProcessorServicer):
    """Serves ext_proc; `exchange` makes an Exchange."""

    def __init__(self, exchange: Callable[[], Exchange], metrics: PickerMetrics) -> None:
        self._exchange = exchange
        self._metrics = metrics

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Context
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """Serve one HTTP request until its proxy's stream ends. An exception here ends the stream
        with an error, and the Gateway's failure mode decides what happens to the request."""
        exchange = self._exchange()
        try:
            async for message in request_iterator:
                for response in await exchange.take(message):
                    yield response
        except Exception:
            self._metrics.failed()
            log.exception("a proxy's stream failed")
            raise
        finally:
            exchange.close()
