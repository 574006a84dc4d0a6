"""Messages of the last release keep their numbers and types; adding fields is allowed.

The previous release, which may run beside this one (docs/upgrades.md), misreads fields with
another type, or with another meaning under an old number.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from released_fields import described

from pdserve.services.common.rpc import PROTOCOL_VERSION

HERE = Path(__file__).parent
LAST = json.loads((HERE / "released_fields.json").read_text())
RELEASES = json.loads((HERE / "releases.json").read_text())
RESERVED = "reserved"


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the incompatible changes from the old messages to the new. A removed field may become
    a reserved number.
    """
    found = []
    for kind in ("messages", "enums"):
        for name, values in old[kind].items():
            there = new[kind].get(name)
            if there is None:
                found.append(f"{name} is gone")
                continue
            for key, value in values.items():
                if there.get(key) not in (value, *((RESERVED,) if kind == "messages" else ())):
                    found.append(f"{name} {key}: was {value!r}, is {there.get(key)!r}")
    for method, types in old["methods"].items():
        if new["methods"].get(method) != types:
            found.append(f"{method}: was {types}, is {new['methods'].get(method)}")
    return found


def test_the_last_release_can_read_messages_of_this_one() -> None:
    assert changes(LAST, described()) == []


def test_a_changed_message_has_the_next_version() -> None:
    *_, last = RELEASES.values()
    changed = described() != LAST
    assert last["protocol"] + changed == PROTOCOL_VERSION


def test_the_protocol_of_the_last_release_is_known() -> None:
    assert LAST["messages"]["pdserve.v1.WorkerHello"]["8"] == RESERVED
    assert len(LAST["messages"]) > 50
    assert len(LAST["methods"]) >= 8


HELLO = "pdserve.v1.WorkerHello"


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("messages", HELLO, {"2": "incarnation: string"}),  # another type
        ("messages", HELLO, {"2": "birth: bytes"}),  # another meaning
        ("messages", HELLO, {"2": None}),  # gone, and free for another one
        ("messages", HELLO, {"8": "dtype: string"}),  # a number that has had a meaning
        ("messages", "pdserve.v1.WorkerReport", {"2": "load: pdserve.v1.Load"}),  # no oneof
        ("enums", "pdserve.v1.Role", {"DECODE": 3}),
        ("methods", "pdserve.v1.Fleet/Join", ["pdserve.v1.WorkerHello", "pdserve.v1.JoinReply"]),
    ],
)
def test_an_incompatible_change_is_found(kind: str, name: str, change: Any) -> None:
    new = copy.deepcopy(LAST)
    if isinstance(change, dict):
        new[kind][name] |= change
    else:
        new[kind][name] = change
    assert len(changes(LAST, new)) == 1


def test_additions_and_reserved_numbers_are_allowed() -> None:
    new = copy.deepcopy(LAST)
    new["messages"][HELLO] |= {"2": RESERVED, "99": "shape: string"}
    new["messages"]["pdserve.v1.Another"] = {"1": "what: string"}
    new["enums"]["pdserve.v1.Role"] |= {"MIXED": 7}
    assert changes(LAST, new) == []
