"""Reads what passes the loopback device. This needs the right to open raw sockets, as root has."""

import ipaddress
import socket
import struct
import threading
from collections import defaultdict

ALL_PROTOCOLS = 3  # ETH_P_ALL
OUTGOING = 4  # PACKET_OUTGOING: the loopback device delivers each packet once more, as incoming
STATISTICS = 263, 6  # SOL_PACKET, PACKET_STATISTICS
FORCED_BUFFER = 33  # SO_RCVBUFFORCE
BUFFER_BYTES = 256 << 20
MAX_PACKET_BYTES = 1 << 17
ETHERNET_BYTES, IPV4, TCP = 14, 0x0800, 6


def may_sniff() -> bool:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except PermissionError:
        return False
    return True


class Sniffer:
    """Context manager that keeps the TCP payloads of all connections, by direction.

    `num_dropped`: packets beyond the kernel's buffer, which were not read.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._sent: dict[tuple[bytes, bytes, int, int], bytearray] = defaultdict(bytearray)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sniffer")

    def __enter__(self) -> "Sniffer":
        protocols = socket.htons(ALL_PROTOCOLS)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, protocols)
        self._socket.setsockopt(socket.SOL_SOCKET, FORCED_BUFFER, BUFFER_BYTES)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.1)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        counts = self._socket.getsockopt(*STATISTICS, 8)
        _, self.num_dropped = struct.unpack("II", counts)
        self._socket.close()

    def passed(self, address: str) -> bytes:
        """Return what was sent from and to the port of `host:port`, one direction of a connection
        after the other.
        """
        host, port = address.split(":")
        place = ipaddress.ip_address(host).packed, int(port)
        found = [
            data
            for (source, target, source_port, target_port), data in self._sent.items()
            if place in ((source, source_port), (target, target_port))
        ]
        return b"|".join(found)

    def _run(self) -> None:
        while True:
            try:
                packet, (_, _, kind, *_) = self._socket.recvfrom(MAX_PACKET_BYTES)
            except TimeoutError:
                if self._over.is_set():
                    return
            else:
                if kind != OUTGOING:
                    self._keep(packet)

    def _keep(self, packet: bytes) -> None:
        (protocol,) = struct.unpack_from(">H", packet, ETHERNET_BYTES - 2)
        ip = packet[ETHERNET_BYTES:]
        if protocol != IPV4 or ip[9] != TCP:
            return
        (length,) = struct.unpack_from(">H", ip, 2)
        tcp = ip[4 * (ip[0] & 15) : length]
        ports = struct.unpack_from(">HH", tcp)
        if payload := tcp[4 * (tcp[12] >> 4) :]:
            self._sent[(ip[12:16], ip[16:20], *ports)] += payload
