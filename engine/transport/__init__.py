"""How KV travels between processes: TCP, shared memory, CUDA IPC."""

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
