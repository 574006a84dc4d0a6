"""The available transports, discovered in this folder and its subfolders."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from pdserve.engine.transport.base import KvTransport, TransportOptions


def transports() -> dict[str, type[KvTransport]]:
    """Return name -> class, in the order in which `auto` tries them."""
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}."):
        importlib.import_module(module.name)
    return {cls.name: cls for cls in sorted(_subclasses(), key=lambda cls: cls.preference)}


def make_transports(choice: str, options: TransportOptions) -> list[KvTransport]:
    """Return the transports that `choice` (a name, or auto) allows, best first.

    Raises ValueError.
    """
    by_name = transports()
    if choice != "auto" and choice not in by_name:
        raise ValueError(
            f"unknown transport {choice!r}; known transports: auto, {', '.join(by_name)}"
        )
    if choice != "auto":
        return [by_name[choice](options)]
    return [cls(options) for cls in by_name.values() if cls.applies(options)]


def _subclasses() -> Iterator[type[KvTransport]]:
    yield from KvTransport.__subclasses__()
