"""Random HTTP requests: bodies by the gateway's own schemas, with faults, and broken HTTP."""

import json
import random
from dataclasses import dataclass
from typing import Any

from mutations import mutated
from pydantic.json_schema import models_json_schema

from paceline.gateway.bodies import Body
from paceline.gateway.requests import ChatRequest, CompletionRequest
from paceline.gateway.responses_api import ResponsesRequest

_TEXTS = ("", "a", "lm", "ngram", "none", "llama", "user", "function", "text", "json_object", "\0",
          "日本 \U0001f600", "x" * 3000, "(a|b)*c", "[a-z]{1,9}", "(", 'root ::= "a" | "b"',
          "start: A", "{{ 1 }}", "../../etc/passwd", "\ud800", "1", "1e400", "</s>")  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 3, 0.5, 1.0, 1e-30, 1e30, 255, 2048, 1 << 31, 1 << 32, 1 << 64, -(1 << 63),
            float("inf"), float("nan"))  # fmt: skip
_METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "CONNECT", "TRACE", "X")
_PATHS = ("/", "/health", "/version", "/v1/models", "/v1/models/llama", "/v1",
          "/v1/models/%00", "//", "/%2e%2e/", "/v1/completions?a=b", "*", "http://x/")  # fmt: skip
_HEADERS = ("", "Authorization: Bearer x\r\n", "Expect: 100-continue\r\n", "x-request-id: \xff\r\n",
            "Content-Encoding: gzip\r\n", "Content-Encoding: br\r\n", "Upgrade: websocket\r\n",
            "Transfer-Encoding: chunked\r\n", "Origin: null\r\n", "Connection: close\r\n",
            "traceparent: 00-x\r\n", "Range: bytes=0-\r\n", "Content-Length: 3\r\n",
            "Origin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\n",
            "Origin: https://page.example\r\n", "Host: page.example\r\n", "Host: [::1\r\n",
            "Content-Type: text/plain\r\n", f"a: {'b' * 9000}\r\n")  # fmt: skip
# A request that is answered, for each path; what is altered in it reaches further.
_VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "on ", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}
_KINDS: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}


@dataclass(frozen=True)
class Request:
    raw: bytes
    whole: bool  # it is one request in valid HTTP, so it must be answered
    head: bool = False  # its response has no body


class HttpFuzzer:
    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        references, schemas = models_json_schema(
            [(kind, "validation") for kind in _KINDS.values()],
            ref_template="#/components/schemas/{model}",
        )
        self.schemas: dict[str, Any] = schemas["$defs"]
        self.bodies: dict[str, Any] = {
            path: self.resolved(references[kind, "validation"]) for path, kind in _KINDS.items()
        }

    def request(self) -> Request:
        draws = self.draws
        match draws.random():
            case chance if chance < 0.75:
                path = draws.choice(list(_VALID))
                return Request(_post(path, json.dumps(self.body(path)).encode()), whole=True)
            case chance if chance < 0.9:
                path = draws.choice(list(_VALID))
                body = mutated(draws, json.dumps(_VALID[path]).encode())
                return Request(_post(path, body), whole=True)
            case chance if chance < 0.95:
                # The body of CONNECT and the like is a protocol of its own: not answered.
                method, path = draws.choice(_METHODS), draws.choice((*_PATHS, *_VALID))
                raw = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
                whole = method not in ("CONNECT", "X", "TRACE") and path.startswith("/")
                return Request(raw, whole, head=method == "HEAD")
            case _:
                path = draws.choice(list(_VALID))
                raw = _post(path, json.dumps(_VALID[path]).encode(), draws.choice(_HEADERS))
                return Request(mutated(draws, raw) if draws.random() < 0.7 else raw, whole=False)

    def body(self, path: str) -> dict[str, Any]:
        """A valid body with some fields at random, most of them of the field's type."""
        body, schema = dict(_VALID[path]), self.bodies[path]
        names = list(schema["properties"])
        for name in self.draws.choices(names, k=self.draws.choice((1, 1, 1, 2, 3, 8))):
            body[name] = self.value(schema["properties"][name], 0)
        return body

    def value(self, schema: dict[str, Any], depth: int) -> Any:
        """A value of a schema; sometimes any value instead."""
        draws, schema = self.draws, self.resolved(schema)
        if draws.random() < 0.15 or depth > 6:
            return self.anything(depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.value(draws.choice(schema[union]), depth)
        if "const" in schema or "enum" in schema:
            return schema.get("const", draws.choice(schema.get("enum", [None])))
        match schema.get("type"):
            case "string":
                return draws.choice(_TEXTS)
            case "integer":
                return draws.choice((0, 1, 2, 3, -1, 97, 255, 319, 320, 1 << 33))
            case "number":
                return draws.choice((*_NUMBERS, draws.uniform(-2, 2)))
            case "boolean":
                return draws.random() < 0.5
            case "array":
                count = draws.choice((0, 1, 1, 2, 5, 40))
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "object":
                return self.one_object(schema, depth)
        return self.anything(depth)

    def one_object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        draws, required = self.draws, schema.get("required", ())
        fields = {
            name: self.value(each, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if draws.random() < (0.95 if name in required else 0.4)
        }
        if "properties" not in schema:
            names = draws.choices((*_TEXTS, "type", "properties", "$ref", "items", "enum"), k=2)
            fields |= {name: self.anything(depth + 1) for name in names}
        return fields

    def anything(self, depth: int) -> Any:
        draws = self.draws
        match draws.randrange(7 if depth < 4 else 5):
            case 0:
                return None
            case 1:
                return draws.choice(_TEXTS)
            case 2:
                return draws.choice(_NUMBERS)
            case 3:
                return draws.random() < 0.5
            case 4:
                return {"type": draws.choice(("object", "string", "integer", "array"))}
            case 5:
                return [self.anything(depth + 1) for _ in range(draws.choice((0, 1, 3)))]
            case _:
                return {draws.choice(_TEXTS): self.anything(depth + 1) for _ in range(2)}

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            found: dict[str, Any] = self.schemas[schema["$ref"].rpartition("/")[2]]
            return found
        return schema


def _post(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
