"""Messages of peers: their size and the number of their fields are checked before they are parsed.

A parser makes an object of hundreds of bytes of each message within a message, and an empty one
takes two bytes: a few megabytes could take gigabytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from paceline.service import limits

M = TypeVar("M", bound=Message)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class MessageTooLarge(ValueError):
    """A message is too long, or has too many fields."""


def parse(kind: type[M], raw: bytes, max_bytes: int) -> M:
    """Parse a message. Raises ``MessageTooLarge``: it has more than ``max_bytes``, or too many
    fields; ``DecodeError``: it is malformed."""
    if len(raw) > max_bytes:
        raise MessageTooLarge(f"a message has {len(raw)} bytes, expected at most {max_bytes}")
    if len(raw) > limits.UNCOUNTED_BYTES:
        count_fields(kind.DESCRIPTOR, raw)
    return kind.FromString(raw)


def count_fields(kind: Any, raw: bytes) -> int:
    """Return the number of fields of a message, whose descriptor is ``kind``, and of the messages
    within it. Raises ``MessageTooLarge`` if there are more than ``MESSAGE_FIELDS``, ``DecodeError``
    if the message is malformed."""
    count, waiting = 0, [(kind, 0, len(raw))]
    while waiting:
        descriptor, at, stop = waiting.pop()
        inner = {
            field.number: field.message_type
            for field in descriptor.fields
            if field.message_type is not None
        }
        while at < stop:
            tag, at = _varint(raw, at)
            count += 1
            if count > limits.MESSAGE_FIELDS:
                raise MessageTooLarge(f"a message has more than {limits.MESSAGE_FIELDS} fields")
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(raw, at)
            elif wire == _BYTES:
                length, at = _varint(raw, at)
                part = inner.get(tag >> 3)
                if part is not None:
                    waiting.append((part, at, min(at + length, stop)))
                at += length
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            else:
                raise DecodeError(f"a message has a field of the unknown kind {wire}")
    return count


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    value = shift = 0
    while at < len(raw) and shift < 70:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise DecodeError("a message ends within a number")
