"""The tables of docs/security.md, and a gRPC method's answer to an empty message."""

from pathlib import Path

import grpc

PAGE = Path(__file__).parents[3] / "docs/security.md"
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def rows(head: str) -> list[list[str]]:
    """Return the cells of the table with this head."""
    lines = PAGE.read_text().split(head)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROUTES = rows("| Route | Who |")
METHODS = rows("| Method | At | Who |")
LISTENERS = rows("| What | At | Who |")


def status(channel: grpc.Channel, method: str, **metadata: str) -> grpc.StatusCode:
    """Return the status of an empty message to a method of any kind; OK as soon as there is an
    answer.
    """
    call = channel.unary_stream(f"/{method}")(b"", metadata=tuple(metadata.items()), timeout=20)
    try:
        for _ in call:
            call.cancel()
            break
    except grpc.RpcError as error:
        found: grpc.StatusCode = error.code()
        return found
    return grpc.StatusCode.OK
