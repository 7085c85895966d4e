"""Names of telemetry, beside those of OpenTelemetry's semantic conventions."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import opentelemetry.semconv
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import GenAiOperationNameValues
from opentelemetry.semconv._incubating.attributes.rpc_attributes import RpcSystemNameValues
from opentelemetry.semconv.schemas import Schemas

from paceline.telemetry.names import CREATE_CACHE, SCHEMA_URL, Attribute, Span

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "metrics.md").read_text() + (DOCS / "look-inside.md").read_text()
CONVENTIONS = Path(opentelemetry.semconv.__path__[0])


def constants(kind: str) -> dict[str, str]:
    """Names of attributes or metrics in the installed conventions, with what is said of each."""
    found: dict[str, str] = {}
    for file in sorted(CONVENTIONS.glob(f"**/{kind}/*.py")):  # stable ones come last
        body = ast.parse(file.read_text()).body
        for node, text in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
                described = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                found[str(node.value.value)] = str(text.value.value) if described else ""
    return found


def values(table: type) -> dict[str, str]:
    return {key: value for key, value in vars(table).items() if not key.startswith("_")}


def test_attributes_are_in_the_conventions_or_our_own() -> None:
    conventions = constants("attributes")
    assert len(conventions) > 500
    for name in values(Attribute).values():
        if name.startswith("specdec."):
            assert name not in conventions
            assert f"`{name}`" in DOCUMENT
        else:
            assert name in conventions
            described = conventions[name]
            assert "Deprecated" not in described or "Moved to" in described, name


def test_values_are_in_the_conventions() -> None:
    assert SCHEMA_URL in {schema.value for schema in Schemas}
    operations = {operation.value for operation in GenAiOperationNameValues}
    assert {Span.GENERATION, Span.CHAT} <= operations
    assert CREATE_CACHE[Attribute.RPC_SYSTEM] == RpcSystemNameValues.GRPC.value


def test_spans_of_our_own_are_documented() -> None:
    for name in values(Span).values():
        assert name in DOCUMENT


def test_metrics_are_in_the_conventions_or_our_own() -> None:
    """The tables list all that there is, see `documented_metrics.py`."""
    conventions = {f"{name.replace('.', '_')}_seconds" for name in constants("metrics")}
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert names
    for name in names - conventions:
        assert name.startswith("specdec_")
