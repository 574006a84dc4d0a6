"""Addresses at which processes listen."""

import socket
from contextlib import suppress

import psutil


def listening(parent: psutil.Process) -> set[str]:
    """Return addresses of a process and its children: host:port of TCP and UDP, paths of unix
    sockets. A child may end in the meantime.
    """
    found = set()
    connections = parent.net_connections("all")
    for child in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            connections += child.net_connections("all")
    for one in connections:
        if one.family == socket.AF_UNIX:
            found.add(str(one.laddr))
        elif one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM:
            host = one.laddr.ip.removeprefix("::ffff:")  # as gRPC binds
            found.add(f"{host}:{one.laddr.port}")
    return found - {""}  # pairs of sockets have no name
