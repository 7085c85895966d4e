"""The OpenAPI document of the gateway, from the schemas that requests are checked with."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from .body import Body
from .requests import ChatRequest, CompletionRequest
from .responses import ResponsesRequest
from .tokens import DetokenizeRequest, TokenizeRequest

_POSTS: dict[str, tuple[type[Body], str]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, in OpenAI's newer form"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
_GETS = {
    "/v1/models": "The served model",
    "/health": "Whether generating requests are accepted",
    "/version": "Version of the gateway",
    "/openapi.json": "This document",
}
_JSON = {"application/json": {"schema": {"type": "object"}}}


@cache
def document() -> dict[str, Any]:
    """The document, version 3.1."""
    references, schemas = models_json_schema(
        [(kind, "validation") for kind, _ in _POSTS.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for path, (kind, summary) in _POSTS.items():
        content = {"application/json": {"schema": references[kind, "validation"]}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": _responses(),
                "security": [{"key": []}],
            }
        }
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline gateway", "version": version("paceline")},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses() -> dict[str, Any]:
    return {
        "200": {"description": "The answer", "content": _JSON},
        "default": {"description": "An error in OpenAI's form", "content": _JSON},
    }
