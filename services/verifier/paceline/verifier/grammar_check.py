"""Compiles a constraint once in a process of its own, whose time and memory are limited.

It also looks for what the library does not see: where a text could begin what no text completes.

A program, not a module: the verifier runs it with the paths of the grammar library's native module
and of ``paceline.sampling.json_schema``, before it compiles the constraint itself. It reads
{"kind", "source", "overrides", "seconds", "memory", "states"} as JSON from standard input, and
writes {"grammar", "bytes"}, the constraint as the library reads it and the memory that it took, or
{"error"}. A limit that is reached ends it without an answer.
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
# In Lark's notation: a text, a regular expression, a special token or a comment.
_LITERAL = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?|/(?!/)(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|(?://|\#)[^\n]*'
)
_DEFINITION = re.compile(r"^[ \t]*[?!]?(\w[\w-]*)(?:\[[^]\n]*\])?(?:\.\d+)?[ \t]*:", re.MULTILINE)
_SYMBOL = re.compile(r"[\w-]+|\{[^}]*\}|\S")


def _load(name: str, path: str) -> ModuleType:
    """Import the module of a file, without the package around it, whose imports take longer than
    most constraints."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the path is of a module"
    assert spec.loader is not None, "the path is of a module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _memory() -> int:
    """Return the memory of this process. Unit: bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _without_spent_patterns(library: Any, schemas: Any, source: str) -> str:
    """Return a JSON schema in which patterns that match names of properties alone are parts of
    these properties. The library would let a text begin another property."""
    root = json.loads(source)
    for schema in list(schemas(root)):
        patterns, named = schema.get("patternProperties"), schema.get("properties", {})
        required = schema.get("required", [])
        if not all(map(isinstance, (patterns, named, required), (dict, dict, list))):
            continue
        names = list(dict.fromkeys([*named, *(name for name in required if isinstance(name, str))]))
        keys = {name: json.dumps(name, ensure_ascii=False) + ":" for name in names}
        text = "{" + "".join(f"{key}null," for key in keys.values())
        for pattern, value in list(patterns.items()):
            if not names or _may(library, names, pattern, text):
                continue
            del patterns[pattern]
            for name in [name for name in names if _may(library, [], pattern, "{" + keys[name])]:
                named[name] = {"allOf": [named[name], value]} if name in named else value
            schema["properties"] = named
    return json.dumps(root, ensure_ascii=False)


def _may(library: Any, names: list[str], pattern: str, text: str) -> bool:
    """Return whether a text may begin an object with these names, and some of a pattern."""
    null = {"type": "null"}
    schema = {"properties": dict.fromkeys(names, null), "patternProperties": {pattern: null}}
    written = json.dumps({"type": "object", "additionalProperties": False, **schema})
    grammar = library.LLMatcher.grammar_from_json_schema(
        written, overrides={"whitespace_flexible": False}
    )
    tokenizer = library.LLTokenizer("byte")
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return True  # of the whole schema, the library says so
    matcher.consume_tokens(tokenizer.tokenize_bytes(text.encode()))
    matcher.compute_bitmask()
    return not matcher.is_error()


def _unfinished(library: Any, lark: str) -> str:
    """Return a rule or terminal of a grammar that no text completes; empty if there is none."""
    plain = _LITERAL.sub(_masked, lark)
    heads = list(_DEFINITION.finditer(plain))
    ends = [*(head.start() for head in heads[1:]), len(plain)]
    bodies = {head[1]: plain[head.end() : end] for head, end in zip(heads, ends, strict=True)}
    terminals = [name for name in bodies if name.isupper()]
    written = "\n".join(
        lark[head.start() : end] for head, end in zip(heads, ends, strict=True) if head[1].isupper()
    )
    for name in terminals:
        if "&" in bodies[name] or "~" in bodies[name]:
            source = f"start: {name}\n{written}"
            matcher = library.LLMatcher(library.LLTokenizer("byte"), source, log_level=0)
            known = matcher.is_error()  # of the whole grammar, the library says so
            matcher.compute_bitmask()
            if matcher.is_error() and not known:
                return name
    left = [name for name in bodies if not name.isupper() and "%" not in bodies[name]]
    while left:
        rest = {*left}
        for name in reversed(left):
            if _completes(_SYMBOL.findall(bodies[name])[::-1], rest):
                rest.remove(name)
        if len(rest) == len(left):
            return left[0]
        left = [name for name in reversed(left) if name in rest]
    return ""


def _masked(literal: re.Match[str]) -> str:
    """Return a number for a literal, and blanks for a comment, of the same length."""
    comment = literal[0].startswith(("#", "//"))
    return ("" if comment else "0").ljust(len(literal[0]))


def _completes(symbols: list[str], unfinished: set[str]) -> bool:
    """Return whether a text completes the body of a rule, up to its end or a closing bracket, if
    none completes the ``unfinished`` rules. Take the symbols from the end of the list."""
    choices, whole = [], True
    while symbols and (symbol := symbols.pop()) not in (")", "]"):
        if symbol == "|":
            choices.append(whole)
            whole = True
            continue
        part = symbol not in unfinished
        if symbol in ("(", "["):
            part = _completes(symbols, unfinished) or symbol == "["
        while symbols and symbols[-1][0] in "?*+~{":
            times = symbols.pop()
            times = symbols.pop() if times == "~" and symbols else times.lstrip("{ ")
            part = part or times[:1] in ("?", "*", "0", ",")
        whole = whole and part
    return any((*choices, whole))


def _check(library: Any, folder: str, schemas: Any, request: dict[str, Any]) -> dict[str, Any]:
    matcher, source = library.LLMatcher, request["source"]
    try:
        if request["kind"] == "json_schema":
            if '"patternProperties"' in source:
                source = _without_spent_patterns(library, schemas, source)
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
            if name := _unfinished(library, lark):
                return {"error": f"is not supported: no text completes {name}"}
            grammar = matcher.grammar_from_lark(lark)
    except (ValueError, RecursionError) as error:
        return {"error": f"cannot be read: {error}"}
    before = _memory()
    limits = library.LLParserLimits(verbose_errors=False, max_lexer_states=request["states"])
    # Ids of tokens are of the model's vocabulary; here it is bytes.
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
    schemas = _load("json_schema", sys.argv[2]).schemas
    answer = _check(library, os.path.dirname(sys.argv[1]), schemas, request)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
