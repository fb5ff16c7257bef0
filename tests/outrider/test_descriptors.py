"""v1 stays readable by its past: nothing of the last release is deleted, renumbered or retyped.

`python tests/outrider/test_descriptors.py` writes the descriptor set of this checkout over the
committed one; that is done at a release, and at no other time.
"""

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from outrider.v1 import draft_service_pb2, generation_service_pb2, status_pb2, tensor_pb2

RELEASED = Path(__file__).with_name("outrider_v1_released.binpb")
FILES = (tensor_pb2, status_pb2, draft_service_pb2, generation_service_pb2)


def current():
    files = descriptor_pb2.FileDescriptorSet()
    for module in FILES:
        files.file.add().MergeFromString(module.DESCRIPTOR.serialized_pb)
    return files


def released():
    return descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())


def breaking_changes(old, new):
    """What a program built from `old` would misread or miss in `new`."""
    found = []
    theirs = {file.name: file for file in new.file}
    for file in old.file:
        if file.name not in theirs:
            found.append(f"file {file.name} deleted")
            continue
        other = theirs[file.name]
        if other.package != file.package:
            found.append(f"file {file.name}: package {file.package} became {other.package}")
        found += _messages(file.package, file.message_type, other.message_type)
        found += _enums(file.package, file.enum_type, other.enum_type)
        found += _services(file.package, file.service, other.service)
    return found


def _messages(scope, old, new):
    theirs = {message.name: message for message in new}
    for message in old:
        name = f"{scope}.{message.name}"
        if message.name not in theirs:
            yield f"message {name} deleted"
            continue
        other = theirs[message.name]
        yield from _fields(name, message, other)
        yield from _messages(name, message.nested_type, other.nested_type)
        yield from _enums(name, message.enum_type, other.enum_type)


def _fields(scope, message, other):
    theirs = {field.name: field for field in other.field}
    numbers = {number for span in other.reserved_range for number in range(span.start, span.end)}
    for field in message.field:
        name = f"{scope}.{field.name}"
        if field.name not in theirs:
            if field.number not in numbers or field.name not in other.reserved_name:
                yield f"field {name} deleted without reserving its number and name"
            continue
        now = theirs[field.name]
        for what in ("number", "type", "type_name", "label", "proto3_optional"):
            if getattr(field, what) != getattr(now, what):
                yield f"field {name}: {what} changed"
        if _oneof(message, field) != _oneof(other, now):
            yield f"field {name}: oneof changed"


def _oneof(message, field):
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None


def _enums(scope, old, new):
    theirs = {enum.name: enum for enum in new}
    for enum in old:
        name = f"{scope}.{enum.name}"
        if enum.name not in theirs:
            yield f"enum {name} deleted"
            continue
        now = {value.name: value.number for value in theirs[enum.name].value}
        for value in enum.value:
            if now.get(value.name) != value.number:
                yield f"enum value {name}.{value.name} deleted or renumbered"


def _services(scope, old, new):
    theirs = {service.name: service for service in new}
    for service in old:
        name = f"{scope}.{service.name}"
        if service.name not in theirs:
            yield f"service {name} deleted"
            continue
        now = {method.name: method for method in theirs[service.name].method}
        for method in service.method:
            if method.name not in now:
                yield f"method {name}.{method.name} deleted"
                continue
            for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
                if getattr(method, what) != getattr(now[method.name], what):
                    yield f"method {name}.{method.name}: {what} changed"


def test_this_checkout_breaks_nothing_of_the_last_release():
    assert released().file
    assert breaking_changes(released(), current()) == []


def message(files, name):
    return next(each for file in files.file for each in file.message_type if each.name == name)


def _delete_field(files):
    del message(files, "Round").field[1]


def _renumber(files):
    message(files, "RoundRow").field[2].number = 14


def _retype(files):
    message(files, "Usage").field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING


def _move_out_of_oneof(files):
    message(files, "Proposal").field[3].ClearField("oneof_index")


def _lose_presence(files):
    message(files, "Sampling").field[0].proto3_optional = False


def _renumber_enum(files):
    files.file[0].enum_type[0].value[2].number = 9


def _delete_enum_value(files):
    del files.file[3].enum_type[0].value[1]


def _delete_message(files):
    del files.file[2].message_type[5]


def _delete_method(files):
    del files.file[3].service[0].method[1]


def _make_unary(files):
    files.file[3].service[0].method[0].server_streaming = False


def _delete_file(files):
    del files.file[1]


@pytest.mark.parametrize(
    "change",
    [
        _delete_field,
        _renumber,
        _retype,
        _move_out_of_oneof,
        _lose_presence,
        _renumber_enum,
        _delete_enum_value,
        _delete_message,
        _delete_method,
        _make_unary,
        _delete_file,
    ],
)
def test_a_breaking_change_is_found(change):
    changed = current()
    change(changed)
    assert len(breaking_changes(current(), changed)) == 1


def test_additions_and_reserved_removals_break_nothing():
    changed = current()
    usage = message(changed, "Usage")
    gone = usage.field.pop()
    usage.reserved_range.add(start=gone.number, end=gone.number + 1)
    usage.reserved_name.append(gone.name)
    usage.field.add(name="added", number=99)
    changed.file[0].enum_type[0].value.add(name="DTYPE_FLOAT16", number=9)
    changed.file[3].service[0].method.add(name="Added")
    changed.file.add(name="outrider/v1/added.proto")
    assert breaking_changes(current(), changed) == []


if __name__ == "__main__":
    RELEASED.write_bytes(current().SerializeToString(deterministic=True))
