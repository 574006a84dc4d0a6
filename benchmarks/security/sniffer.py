"""Record every packet of a network namespace: `python sniffer.py FILE`, until SIGTERM.

FILE has each packet after its length. At the end it prints the kernel's counts: a dropped packet
cannot be searched.
"""

import json
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress

ETH_P_ALL = 3
PACKET_OUTGOING = 4  # such a packet of `lo` is repeated as an incoming one
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 512 << 20
MOST_BYTES = 1 << 17  # of one packet
LENGTH = struct.Struct("<I")


def sniff(file: str) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    every = socket.htons(ETH_P_ALL)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, every) as wire, open(file, "wb") as out:

        def keep_one() -> None:
            packet, (device, _, kind, *_) = wire.recvfrom(MOST_BYTES)
            if (device, kind) != ("lo", PACKET_OUTGOING):
                out.write(LENGTH.pack(len(packet)) + packet)

        wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        wire.settimeout(0.1)
        print("ready", flush=True)
        while not over.is_set():
            with suppress(TimeoutError):
                keep_one()
        wire.setblocking(False)
        with suppress(BlockingIOError):
            while True:  # drains the buffer
                keep_one()
        counted = wire.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
    packets, drops = struct.unpack("II", counted)
    print(json.dumps({"packets": packets, "drops": drops}))


if __name__ == "__main__":
    sniff(sys.argv[1])
