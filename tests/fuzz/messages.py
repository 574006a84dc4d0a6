"""Protobuf messages with drawn fields."""

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fuzz.mutate import EDGES, STRINGS

_INTS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
FLOATS = [0.0, -1.0, 1.0, 1e30, float("nan"), float("inf"), 0.7, 1e-30]
MAX_REPEATED = 5


def fill(rng: Random, message: Message, given: float = 0.5, depth: int = 4) -> None:
    """Set each field with this probability; at most one field of a oneof stays."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > given:
            continue
        if _is_map(field):
            key, value = field.message_type.fields
            for _ in range(rng.randrange(MAX_REPEATED)):
                getattr(message, field.name)[_scalar(rng, key)] = _scalar(rng, value)
        elif field.is_repeated:
            count = rng.randrange(MAX_REPEATED)
            for _ in range(count):
                if field.message_type:
                    if depth:
                        fill(rng, getattr(message, field.name).add(), given, depth - 1)
                else:
                    getattr(message, field.name).append(_scalar(rng, field))
        elif field.message_type:
            if depth:
                inner = getattr(message, field.name)
                inner.SetInParent()
                fill(rng, inner, given, depth - 1)
        else:
            setattr(message, field.name, _scalar(rng, field))


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _scalar(rng: Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _INTS:
        low, high = _INTS[kind]
        number = rng.choice((*EDGES, rng.randrange(300), -1))
        return min(max(number, low), high)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((b"", rng.randbytes(16), rng.randbytes(rng.randrange(40))))
    return rng.choice(STRINGS).encode("utf-8", "replace").decode()
