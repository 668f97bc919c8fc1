"""Chat templates that show tools, after the forms of common models', and tools for them."""

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "What time it is."}},
]

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\n# tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\n' }}
    {%- endfor %}
    {{- 'Call one so: <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n' }}
    {%- endif %}
{%- endif %}
"""
"""As Qwen's, with its switch for thinking."""

MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = """{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}
    {{- 'Respond with {"name": function name, "parameters": dictionary of names and values}.\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {{- '}' }}
    {%- else %}
        {{- message.role + ': ' + message.content + '\n' }}
    {%- endif %}
{%- endfor %}
"""

HARMONY = """{%- set ns = namespace(called='') %}
{{- '<|start|>system<|message|>Effort: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '// ' + tool.description + '\n' + tool.name + ': ' + ((tool.parameters or {}) | tojson) + '\n' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content + '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set ns.called = call.name %}
        {%- if message.thinking and message.content %}{{ raise_exception('one of them') }}{% endif %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.thinking or message.content) }}
        {{- '<|end|><|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}
        {{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' }}
"""
"""As gpt-oss's: messages in channels, and an effort."""


def showing(calls: str) -> str:
    """A template that shows tools, and that calls are to be written as ``calls``."""
    return (
        "{% if tools %}{{ tools | tojson }} Call so: " + calls + "{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message.tool_calls or '' }}"
        "{{ '\n' }}{% endfor %}"
    )


SHOWN = {
    "harmony": HARMONY,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama3": LLAMA3,
    "args": showing("[TOOL_CALLS]name[ARGS]{...}"),
    "xml": showing("<tool_call>\\n<function=example>\\n<parameter=x>\\n1\\n</parameter>..."),
    "glm": showing("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>...</tool_call>"),
    "smollm3": showing("{{ python_tools }}<code>..</code> " + r"<tool_call>\n{\"name\": <name>, ..}"),
    "phi": showing("<|tool_call|>[...]<|/tool_call|>"),
    "granite": showing("<|tool_call|> followed by a JSON list"),
    "lfm2": showing('List of tools: [{"type": "function", ...}]'),
    "gemma4": showing("<|tool_call>call:name{...}<tool_call|>"),
    "nemotron": showing('<TOOLCALL>[{{"name": "tool_name1", "arguments": ...}}]</TOOLCALL>'),
    "functools": showing('functools[{"name": ...}]'),
}
"""A template of each form."""
