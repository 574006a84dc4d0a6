"""Print the messages of this tree; tests/test_released_messages.py compares the last release with
them.

Run `python tools/tables/released_fields.py > tests/released_fields.json` at a release.
"""

import json
from importlib import import_module
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

FILES = ("common", "fleet", "worker", "router", "text")
TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def type_of(field: FieldDescriptor) -> str:
    """The type as in the .proto, and the oneof that contains the field."""
    named = field.message_type or field.enum_type
    words = ["repeated"] if field.is_repeated else []
    words.append(TYPES[field.type] if named is None else named.full_name)
    if field.containing_oneof is not None:
        words.append(f"of {field.containing_oneof.name}")
    return " ".join(words)


def messages_of(file: FileDescriptor) -> list[Descriptor]:
    """The messages, including nested ones."""
    found = list(file.message_types_by_name.values())
    for message in found:
        found += message.nested_types
    return found


def fields_of(message: Descriptor) -> dict[str, str]:
    """Name and type by number; a reserved number is "reserved"."""
    fields = {field.number: f"{field.name}: {type_of(field)}" for field in message.fields}
    proto = DescriptorProto()
    message.CopyToProto(proto)
    for span in proto.reserved_range:
        fields |= dict.fromkeys(range(span.start, span.end), "reserved")
    return {str(number): fields[number] for number in sorted(fields)}


def described() -> dict[str, dict[str, Any]]:
    """Fields by message, values by enum, request and response by method."""
    files = [import_module(f"pdserve.protos.{name}_pb2").DESCRIPTOR for name in FILES]
    return {
        "messages": {m.full_name: fields_of(m) for file in files for m in messages_of(file)},
        "enums": {
            enum.full_name: {value.name: value.number for value in enum.values}
            for file in files
            for enum in file.enum_types_by_name.values()
        },
        "methods": {
            f"{service.full_name}/{method.name}": [
                method.input_type.full_name,
                method.output_type.full_name,
            ]
            for file in files
            for service in file.services_by_name.values()
            for method in service.methods
        },
    }


if __name__ == "__main__":
    print(json.dumps(described(), indent=1))
