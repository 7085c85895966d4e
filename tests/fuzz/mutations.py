"""Random messages of any type, with and without corrupted bytes."""

import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INTEGERS = (0, 1, 2, 3, 7, 31, 32, 255, 256, 4095, 1 << 20, (1 << 31) - 1, (1 << 32) - 1)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "ngram", "lm", "none", "1", "2", "a b", "../../etc/passwd", "/", "/dev/zero",
          "/dev/shm", "\0", "x" * 5000, "日本", "127.0.0.1:1", "unix:/x", "169.254.0.1:80",
          "dns:///localhost:1", "00-" + "a" * 32 + "-" + "b" * 16 + "-01")  # fmt: skip


class Fuzzer:
    """Draws messages from a seeded generator.

    `capabilities` are valid handles and read grants. Bytes fields often hold one, so that calls get
    past the first check.
    """

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.capabilities: list[bytes] = []

    def raw(self, kind: Descriptor) -> bytes:
        """A serialized random message, often with corrupted bytes."""
        raw = self.message(kind).SerializeToString()
        return raw if self.draws.random() < 0.6 else mutated(self.draws, raw)

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A random message: each field is set at random, to any value of its type."""
        message = GetMessageClass(kind)()
        for field in kind.fields:
            if self.draws.random() < (0.6 if depth < 3 else 0.1):
                self.fill(message, field, depth)
        return message

    def altered(self, messages: list[Message]) -> list[bytes]:
        """Serialized messages, one of them with a random field or corrupted bytes."""
        faulty = self.draws.randrange(len(messages))
        raws = []
        for index, message in enumerate(messages):
            raw = message.SerializeToString()
            if index == faulty and self.draws.random() < 0.3:
                raw = mutated(self.draws, raw)
            elif index == faulty:
                self.alter(message)
                raw = message.SerializeToString()
            raws.append(raw)
        return raws

    def alter(self, message: Message) -> None:
        field, value = self.draws.choice([*message.ListFields(), (None, None)])
        if field is None:
            field = self.draws.choice(message.DESCRIPTOR.fields)
        elif isinstance(value, Message) and self.draws.random() < 0.9:
            return self.alter(value)
        message.ClearField(field.name)
        return self.fill(message, field, 1)

    def fill(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        draws = self.draws
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(draws.choice((1, 3, 20))):
                getattr(message, field.name)[self.value(key)] = self.value(value)
        elif field.is_repeated:
            count = draws.choice((0, 1, 2, 5, 17, 300))
            if field.message_type is not None:
                for _ in range(min(count, 5)):
                    part = self.message(field.message_type, depth + 1)
                    getattr(message, field.name).append(part)
            else:
                values: list[Any] = [self.value(field) for _ in range(count)]
                if _is_integer(field) and draws.random() < 0.5:  # valid token ids
                    values = [draws.randrange(300) for _ in range(count)]
                getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self.value(field))

    def value(self, field: FieldDescriptor) -> Any:
        draws = self.draws
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return draws.choice((*_FLOATS, draws.uniform(-2, 2)))
        if field.type == FieldDescriptor.TYPE_STRING:
            return draws.choice(_TEXTS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            known = [draws.choice(self.capabilities)] * 6 if self.capabilities else []
            return draws.choice([b"", b"x", draws.randbytes(16), draws.randbytes(3000), *known])
        if field.type == FieldDescriptor.TYPE_BOOL:
            return draws.random() < 0.5
        value = draws.choice((*_INTEGERS, draws.randrange(300)))
        if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32):
            return draws.choice((-1, -2, -(1 << 31), value % (1 << 31)))
        if field.type == FieldDescriptor.TYPE_ENUM:
            return value % (1 << 31)
        return value


def mutated(draws: random.Random, raw: bytes) -> bytes:
    """Bytes with some changed, removed, added or repeated."""
    data = bytearray(raw)
    for _ in range(draws.randint(1, 8)):
        at = draws.randrange(len(data) + 1)
        match draws.randrange(4):
            case 0:
                data[at : at + 1] = draws.randbytes(1)
            case 1:
                del data[at : at + draws.randint(1, 9)]
            case 2:
                data[at:at] = draws.randbytes(draws.randint(1, 9))
            case _:
                data[at:at] = data[: draws.randint(0, 40)]
    return bytes(data)


def _is_integer(field: FieldDescriptor) -> bool:
    return field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)
