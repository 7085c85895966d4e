"""The protocol keeps to buf's STANDARD style, and says what every field means."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

Named = Iterator[tuple[str, tuple[int, ...]]]

ROOT = Path(__file__).parents[2] / "protos"
FOLDER = ROOT / "paceline" / "v1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """All files of the protocol, comments included."""
    out = tmp_path_factory.mktemp("protos") / "set.bin"
    sources = [str(path) for path in sorted(FOLDER.glob("*.proto"))]
    arguments = ["protoc", f"-I{ROOT}", "--include_source_info", f"--descriptor_set_out={out}"]
    assert protoc.main([*arguments, *sources]) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def declared(file: FileDescriptorProto) -> Named:
    """Every named thing in a file, with its path in the source info."""
    kinds = (
        (4, file.message_type, "field"),
        (5, file.enum_type, "value"),
        (6, file.service, "method"),
    )
    for kind, found, parts in kinds:
        for index, each in enumerate(found):
            yield each.name, (kind, index)
            for number, part in enumerate(getattr(each, parts)):
                yield f"{each.name}.{part.name}", (kind, index, 2, number)


def test_everything_is_commented(files: list[FileDescriptorProto]) -> None:
    bare = []
    for file in files:
        comments = {
            tuple(place.path): place.leading_comments.strip()
            for place in file.source_code_info.location
        }
        bare += [name for name, path in declared(file) if not comments.get(path)]
    assert not bare


def test_names_follow_the_standard_rules(files: list[FileDescriptorProto]) -> None:
    requests: list[str] = []
    for file in files:
        assert file.package == "paceline.v1"
        for enum in file.enum_type:
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
            assert enum.value[0].number == 0
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value)
        for message in file.message_type:
            assert re.fullmatch(r"([A-Z][a-z0-9]*)+", message.name)
            assert all(re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in message.field)
        for service in file.service:
            assert service.name.endswith("Service")
            for method in service.method:
                assert method.input_type.endswith(f".{method.name}Request")
                assert method.output_type.endswith(f".{method.name}Response")
                requests += [method.input_type, method.output_type]
    assert len(requests) == len(set(requests))
