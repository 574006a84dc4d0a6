"""The transports that carry KV from prefill to decode processes: TCP, shared memory and CUDA
IPC."""

from pdserve.engine.transport.base import (
    DEVICE_SLOT_BYTES,
    SLOTS,
    DeviceSink,
    DeviceSource,
    Frame,
    FrameJob,
    KvTransport,
    Listener,
    Payload,
    Target,
    TransportOptions,
    TransportRefused,
    Wire,
    WireClosed,
    make_transports,
)
from pdserve.engine.transport.device import Copy, DeviceError
