# ruff: noqa: E501
"""The constructs of published chat templates, one small template for each family of models.

They are written for these tests. Each has what its family does differently: tags, filters, how
tools, calls, results and system messages are told, and what it refuses.
"""

from __future__ import annotations

CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}\
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' \
and not m.tool_calls) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}\
{% endif %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}\
<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

QWEN3 = CHATML.replace(
    "{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant'",
    "{% set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content "
    "else m.content %}{{ content }}<|im_end|>\n{% elif m.role == 'assistant'",
)

QWEN3_CODER = """\
{% macro extra(value, known) %}{% if value is mapping %}{% for key in value %}\
{% if key not in known %}
<{{ key }}>{{ value[key] | tojson if value[key] is not string else value[key] }}</{{ key }}>\
{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = [] %}{% endif %}
{%- if system is defined or tools %}<|im_start|>system
{{ system if system is defined else 'You are Qwen.' }}
{%- if tools is iterable and tools | length > 0 %}<tools>{% for tool in tools %}\
{% if tool.function is defined %}{% set tool = tool.function %}{% endif %}
<function><name>{{ tool.name }}</name>{% for name, field in tool.parameters.properties | items %}
<parameter><name>{{ name }}</name>{{ extra(field, ['name', 'type']) }}</parameter>{% endfor %}\
{{ extra(tool, ['name', 'parameters']) }}</function>{% endfor %}</tools>{% endif %}<|im_end|>
{% endif %}
{%- for m in rest %}<|im_start|>{{ m.role if m.role != 'tool' else 'user' }}
{%- if m.content is string and m.content | trim | length > 0 %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson | safe }}
</parameter>{% endfor %}
</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not date_string is defined %}{% if strftime_now is defined %}\
{% set date_string = strftime_now("%Y") %}{% else %}{% set date_string = "2024" %}{% endif %}\
{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}\
{% set messages = messages[1:] %}{% else %}{% set system = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system }}\
<|eot_id|>
{%- if tools_in_user_message and tools is not none %}{% if messages | length != 0 %}\
{% set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% else %}\
{{ raise_exception("There is no first message of the user") }}{% endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}{% for t in tools %}\
{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}{{ first + "<|eot_id|>" }}{% endif %}
{%- for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or \
'tool_calls' in m) %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + \
m['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}\
{{ raise_exception("Only one call at a time") }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{{ '{"name": "' + call.name + '", ' }}"parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>ipython<|end_header_id|>

{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}\
{{ m.content }}{% endif %}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
{% endif %}"""

MISTRAL_V3 = """\
{%- if messages[0]["role"] == "system" %}{% set system = messages[0]["content"] %}\
{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{% set ns.index = 0 %}
{%- for m in turns %}{% if not (m.role == "tool" or m.role == "tool_results" or (m.tool_calls is \
defined and m.tool_calls is not none)) %}{% if (m["role"] == "user") != (ns.index % 2 == 0) %}\
{{ raise_exception("After the system message, roles alternate user and assistant") }}{% endif %}\
{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in turns %}{% if m["role"] == "user" %}{% if tools is not none and (m == asked[-1]) %}\
[AVAILABLE_TOOLS] [{% for tool in tools %}{% set tool = tool.function %}{"type": "function", \
"function": {{ "{" }}{% for key, val in tool.items() if key != "return" %}{% if val is string %}\
"{{ key }}": "{{ val }}"{% else %}"{{ key }}": {{ val | tojson }}{% endif %}\
{% if not loop.last %}, {% endif %}{% endfor %}}}{% if not loop.last %}, {% else %}]{% endif %}\
{% endfor %}[/AVAILABLE_TOOLS]{% endif %}{% if loop.last and system is defined %}\
[INST] {{ system }}

{{ m["content"] }}[/INST]{% else %}[INST] {{ m["content"] }}[/INST]{% endif %}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [\
{% for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}\
{% if not call.id is defined or call.id | length != 9 %}\
{{ raise_exception("Ids of calls are alphanumeric, with a length of 9") }}{% endif %}\
, "id": "{{ call.id }}"}{% if not loop.last %}, {% else %}]{{ eos_token }}{% endif %}{% endfor %}
{%- elif m["role"] == "assistant" %} {{ m["content"] | trim }}{{ eos_token }}
{%- elif m["role"] == "tool" %}{% if m.content is defined and m.content.content is defined %}\
{% set content = m.content.content %}{% else %}{% set content = m.content %}{% endif %}\
[TOOL_RESULTS] {"content": {{ content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]\
{% if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}\
{{ raise_exception("Ids of calls are alphanumeric, with a length of 9") }}{% endif %}
{%- else %}{{ raise_exception("Only the roles user, assistant, system and tool are known") }}\
{% endif %}{% endfor %}"""

MISTRAL_SMALL3 = """\
{{- bos_token }}{% set today = strftime_now("%Y-%m") %}
{%- if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}\
{% set system = messages[0]['content'] %}{% else %}\
{% set system = messages[0]['content'][0]['text'] %}{% endif %}{% set turns = messages[1:] %}\
{% else %}{% set system = "Today is " + today %}{% set turns = messages %}{% endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- if tools is defined and tools is not none and tools | length > 0 %}\
{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{% endif %}
{%- for m in turns %}{% if m['role'] == 'user' %}{% if m['content'] is string %}\
{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}[INST]{% for part in m['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}[IMG]{% endif %}{% endfor %}[/INST]\
{% endif %}
{%- elif m['role'] == 'assistant' %}{% if m['content'] is defined and m['content'] %}\
{{ m['content'] if m['content'] is string else m['content'][0]['text'] }}{% endif %}\
{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]\
{{ call.function.arguments if call.function.arguments is string else \
call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif m['role'] == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}\
[/TOOL_RESULTS]{% else %}{{ raise_exception('Role ' + m['role'] + ' is not known') }}{% endif %}\
{% endfor %}"""

MIXTRAL = """\
{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles alternate: user, assistant, user, ...') }}{% endif %}\
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}\
{{ m['content'] + eos_token }}{% endif %}{% endfor %}"""

GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('There is no role system') }}{% endif %}{% for m in messages %}\
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles alternate: user, assistant, user, ...') }}{% endif %}\
{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for m in turns -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles alternate: user, assistant, user, ...") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + \
(first if loop.first else "") }}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for part in m['content'] -%}
            {%- if part['type'] == 'image' -%}<start_of_image>{%- else -%}
                {{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Content is a text or a list") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}"""

PHI3 = """\
{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}\
{{ '<|system|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'user' %}\
{{ '<|user|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'assistant' %}\
{{ '<|assistant|>\\n' + m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4_MINI = """\
{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}\
{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|end|>' }}\
{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK_R1 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system='') %}\
{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = m['content'] %}\
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}\
{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.is_tool = false -%}\
{{ '<｜User｜>' + m['content'] }}{%- endif %}\
{%- if m['role'] == 'assistant' and m['content'] is none %}{%- set ns.is_tool = false -%}\
{%- for tool in m['tool_calls'] %}{%- if not ns.is_first %}\
{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- set ns.is_first = true -%}{%- endif %}\
{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + \
'```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>' }}\
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if m['role'] == 'assistant' and m['content'] is not none %}\
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}\
{%- set ns.is_tool = false -%}{%- else %}{% set content = m['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endif %}\
{%- if m['role'] == 'tool' %}{%- set ns.is_tool = true -%}\
{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor -%}\
{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

GLM4 = """\
[gMASK]<sop>{% if tools %}<|system|>
# Tools
{% for tool in tools %}{% if tool['type'] == 'function' %}
## {{ tool['function']['name'] }}
{{ tool['function'] | tojson(indent=4, ensure_ascii=False) }}{% endif %}{% endfor %}{% endif %}
{%- for m in messages %}{% if m.role == 'system' %}<|system|>
{{ m.content }}{% endif %}{% if m['role'] == 'user' %}<|user|>
{{ m['content'] }}{% elif m['role'] == 'assistant' %}
{%- if m.content %}<|assistant|>
{{ m.content.split('</think>') | last | trim }}{% endif %}
{%- for call in m.tool_calls or [] %}<|assistant|>{{ call.function.name }}
{{ call.function.arguments | tojson(ensure_ascii=False) }}{% endfor %}
{%- elif m['role'] == 'tool' %}<|observation|>
{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

SMOLLM2 = """\
{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SMOLLM3 = """\
{# ───── defaults ───── #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- set system = messages[0].content.rstrip() if messages[0].role == "system" else "" -%}
<|im_start|>system
Mode: {{ mode }}
{{ system }}
{%- if xml_tools or python_tools or tools -%}
### Tools
  {%- if xml_tools or tools -%}
    {%- if tools -%}{%- set xml_tools = tools -%}{%- endif -%}
    {%- set ns = namespace(text="Signatures:\\n<tools>\\n") -%}
    {%- for tool in xml_tools[:] -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" -%}
    {%- endfor -%}
    {{ ns.text + "</tools>" }}
  {%- endif -%}
{%- endif -%}
<|im_end|>
{% for m in messages %}
  {%- set content = m.content if m.content is string else "" -%}
  {%- if m.role == "user" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
  {%- elif m.role == "assistant" -%}
  {% generation %}
  {%- if mode == "/think" -%}
    {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
  {%- else -%}
    {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
  {%- endif -%}
  {% endgeneration %}
  {%- elif m.role == "tool" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
  {%- endif -%}
{% endfor %}
{%- if add_generation_prompt -%}
{{ "<|im_start|>assistant\\n" + ("" if enable_thinking else "<think>\\n\\n</think>\\n") }}
{%- endif -%}"""

SMOLLM3_FIRST = SMOLLM3.replace(" or tools -%}", " -%}").replace(
    "{%- if tools -%}{%- set xml_tools = tools -%}{%- endif -%}", ""
)

GRANITE3 = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}\
{% set turns = messages[1:] %}{% else %}{% set system = "You are Granite. Today is " + \
strftime_now('%B') + "." %}\
{%- if tools and documents %}{% set system = system + " Tools and documents." %}\
{%- elif documents %}{% set system = system + " Documents." %}{% endif %}{% set turns = messages %}\
{% endif %}<|start_of_role|>system<|end_of_role|>{{ system }}<|end_of_text|>
{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{% endif %}{% if documents %}<|start_of_role|>documents<|end_of_role|>{% for d in documents %}\
Document {{ loop.index0 }}
{{ d['text'] }}{% if not loop.last %}

{% endif %}{% endfor %}<|end_of_text|>
{% endif %}{% for m in turns %}<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}\
<|end_of_text|>
{% if loop.last and add_generation_prompt %}<|start_of_role|>assistant{% if controls %}\
{{ controls | tojson(sort_keys=True) }}{% endif %}<|end_of_role|>{% endif %}{% endfor %}"""

GPT_OSS = """\
{%- macro render_type(spec) -%}
    {%- if spec.type == "array" -%}
        {{- render_type(spec['items']) + "[]" if spec['items'] else "any[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and \
spec.type is not mapping -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- else -%}
        {{- spec.type | default("any") -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro render_tools(tools) -%}
namespace functions {
{% for tool in tools %}{% set tool = tool.function %}
{{ "// " + tool.description + "\\n" if tool.description else "" }}
{{- "type " + tool.name + " = (_: {" }}{% for name, spec in tool.parameters.properties.items() %}
{{ name + ("" if name in (tool.parameters.required or []) else "?") + ": " }}{{ render_type(spec) }},
{%- endfor %}}) => any;
{% endfor %}}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n\\nReasoning: " + \
(reasoning_effort | default("medium")) + "\\n<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
{%- set developer = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set developer = "" %}{% set turns = messages %}{% endif %}
{%- if developer or tools %}<|start|>developer<|message|>
{%- if developer %}{{ developer }}{% endif %}
{%- if tools %}{{- render_tools(tools) }}{% endif %}<|end|>{% endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for m in turns -%}
    {%- if m.role == 'assistant' -%}
        {%- if "content" in m and m.content is string and "<|channel|>analysis" in m.content %}
            {{- raise_exception("Pass thoughts apart from the content") }}
        {%- endif %}
        {%- if "tool_calls" in m %}
            {%- set tool_call = m.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if m.content and m.thinking %}
                {{- raise_exception("A call has content or thoughts, not both") }}
            {%- elif m.content or m.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + \
(m.content or m.thinking) + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + \
"<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments | tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif m.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("There is no call before this result") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + m.content | tojson + "<|end|>" }}
    {%- elif m.role == 'user' -%}
        {{- "<|start|>user<|message|>" + m.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

QWEN35 = """\
{%- macro text(content) %}{% if content is string %}{{ content }}{% elif content is iterable %}\
{% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- set ns = namespace(asked=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = true %}{% endif %}{% endfor %}
{%- if not ns.asked %}{{ raise_exception('There is no question') }}{% endif %}
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\
{% if messages[0].role == 'system' %}{{ text(messages[0].content) }}{% endif %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ text(messages[0].content) | trim }}<|im_end|>
{% endif %}
{%- for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}\
{{ raise_exception('The system message is the first one') }}{% endif %}
{%- elif m.role == 'user' %}<|im_start|>user
{{ text(m.content) }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ text(m.content) }}{% for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>{% endfor %}
</function>
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>{{ text(m.content) }}</tool_response><|im_end|>
{% else %}{{ raise_exception('A role is unknown') }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

ZEPHYR = """\
{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '<|user|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'system' %}
{{ '<|system|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

LOOPS = """\
{% macro each(n) %}{% for i in range(n) %}{{ caller(i) }}{% endfor %}{% endmacro %}\
{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% for part in \
[m.content, 'never'] %}{{ m.role }}: {{ part }}
{% break %}{% endfor %}{% for call in m.tool_calls or [] %}{{ call.function.name }}\
{{ cycler('a', 'b').next() }}{% endfor %}{% endfor %}{{ dict(a=1) | dictsort }}\
{{ dict.fromkeys(['x']) }}{{ [3, 1] | sort | join(',') }}{{ {'b': 1} | tojson(sort_keys=true) }}\
{{ namespace(self=2).self }}{% filter upper %}end{% endfilter %}{{ 'q' is in ['q'] }}\
{{ undefined_thing is defined }}{% call(x) each(3) %}<{{ x }}>{% endcall %}"""

SHAPES = {
    name: value for name, value in globals().items() if name.isupper() and isinstance(value, str)
}
