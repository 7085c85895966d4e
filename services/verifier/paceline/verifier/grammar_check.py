"""Compiles a constraint once in a process of its own, whose time and memory are limited.

A program, not a module: the verifier runs it with the path of the grammar library's native module,
before it compiles the constraint itself. It reads {"kind", "source", "overrides", "seconds",
"memory", "states"} as JSON from standard input, and writes {"grammar", "bytes"}, the constraint as
the library reads it and the memory that it took, or {"error"}. A limit that is reached ends it
without an answer.
"""

import importlib.util
import json
import os
import re
import resource
import sys
from types import ModuleType
from typing import Any

_TOKENS = re.compile(r"<\[(\^?)[\d, -]+\]>")


def _load(name: str, path: str) -> ModuleType:
    """The module of a file, without the package around it, whose imports take longer than most
    constraints."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the path is of a module"
    assert spec.loader is not None, "the path is of a module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _memory() -> int:
    """Memory of this process. Unit: bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _check(library: Any, folder: str, request: dict[str, Any]) -> dict[str, Any]:
    matcher, source = library.LLMatcher, request["source"]
    try:
        if request["kind"] == "json_schema":
            grammar = matcher.grammar_from_json_schema(source, overrides=request["overrides"])
        elif request["kind"] == "regex":
            grammar = matcher.grammar_from_regex(source)
        else:
            gbnf = _load("gbnf_to_lark", os.path.join(folder, "gbnf_to_lark.py"))
            try:
                lark = gbnf.any_to_lark(source)
            except MemoryError:
                raise
            except Exception as error:  # the library raises its own class, or none
                return {"error": f"cannot be read: {error}"}
            grammar = matcher.grammar_from_lark(lark)
    except (ValueError, RecursionError) as error:
        return {"error": f"cannot be read: {error}"}
    before = _memory()
    limits = library.LLParserLimits(verbose_errors=False, max_lexer_states=request["states"])
    # Ids of tokens are those of the model's vocabulary; here it is bytes.
    in_bytes = _TOKENS.sub(r"<[\g<1>256]>", grammar)
    compiled = matcher(library.LLTokenizer("byte"), in_bytes, log_level=0, limits=limits)
    if not compiled.is_error():
        compiled.compute_bitmask()
    if compiled.is_error():
        return {"error": f"is not supported: {compiled.get_error()}"}
    return {"grammar": grammar, "bytes": max(0, _memory() - before)}


def main() -> None:
    """Read the request, set the limits, and answer."""
    request = json.load(sys.stdin)
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"] + 1))
    library = _load("_lib", sys.argv[1])
    answer = _check(library, os.path.dirname(sys.argv[1]), request)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
