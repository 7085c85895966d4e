"""Tools in the text of a conversation, for chat templates that do not know them.

The form is that of the Hermes models (https://github.com/NousResearch/Hermes-Function-Calling),
which many models were trained with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_TOOLS = """You may call functions. Their signatures, as JSON, are inside <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and arguments inside tags:
<tool_call>
{{"name": <function name>, "arguments": <object>}}
</tool_call>"""


def in_hermes_form(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results as text.

    Args:
        messages: As for a template that knows tools.
        tools: The tools, as in a request; empty: none.

    Returns:
        Messages with roles and contents only. Results have the role "user".
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", ())
        texts = [message["content"]] if message["content"] else []
        texts += [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
        message["content"] = "\n".join(texts)
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1]["role"] == "user" and "<tool_response>" in plain[-1]["content"]:
                plain[-1]["content"] += f"\n{answer}"
                continue
            message = {"role": "user", "content": answer}
        plain.append(message)
    if tools:
        text = _TOOLS.format(tools="\n".join(map(json.dumps, tools)))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{text}"
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain
