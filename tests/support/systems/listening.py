"""Addresses at which processes listen."""

import socket

import psutil


def listening(parent: psutil.Process) -> set[str]:
    """Return addresses of a process and its children: host:port of TCP and UDP, paths of unix
    sockets.
    """
    found = set()
    for process in (parent, *parent.children(recursive=True)):
        for one in process.net_connections("all"):
            if one.family == socket.AF_UNIX:
                found.add(str(one.laddr))
            elif one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM:
                host = one.laddr.ip.removeprefix("::ffff:")  # as gRPC binds
                found.add(f"{host}:{one.laddr.port}")
    return found - {""}  # pairs of sockets have no name
