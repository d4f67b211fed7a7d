"""Chat templates in the manner of well-known model families, each with a tokenizer that has that family's tokens.

They keep what makes the originals hard to continue in token space: thoughts of earlier turns are forgotten, the last turn is
written differently, tool results are gathered in one turn, roles must alternate, and ids must have nine characters.
"""

from transformers import PreTrainedTokenizerFast

from tests.cpu.tiny_chat import make_tokenizer

_TOOLS_BLOCK = """
{%- macro tools_block(tools) -%}
# Tools

The signatures of your functions are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

To call one, write its name and arguments as JSON:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>
{%- endmacro -%}
"""

_HERMES_HEAD = """
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if has_system %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
{{- tools_block(tools) + '<|im_end|>\\n' -}}
{%- elif has_system -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
"""

_HERMES_CALLS = """
    {%- for call in message.tool_calls -%}
      {%- if loop.index0 > 0 or message.content %}{{ '\\n' }}{% endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
"""

_HERMES_RESULT = """
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
  {%- endif -%}
{%- endfor -%}
"""

QWEN25 = (
    _TOOLS_BLOCK
    + _HERMES_HEAD
    + """
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' + message.content -}}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' -}}"
    + _HERMES_RESULT
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)

QWEN3 = (
    _TOOLS_BLOCK
    + _HERMES_HEAD
    + """
{%- set ns = namespace(last_query=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last_query = messages.index(message) -%}{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set words = message.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last_query and (loop.last or thought) -%}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- words -}}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' -}}"
    + _HERMES_RESULT
    + """
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""
)

LLAMA3 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif -%}
{{- system | trim + '<|eot_id|>' -}}
{%- if tools -%}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a call as {"name": name, "parameters": object}.\\n\\n' -}}
  {%- for tool in tools %}{{ (tool | tojson) + '\\n\\n' }}{% endfor -%}
  {{- messages[0].content | trim + '<|eot_id|>' -}}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' or message.role == 'ipython' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' -}}
  {%- elif message.tool_calls is defined -%}
    {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif -%}
    {%- set call = message.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' -}}
    {{- (call.arguments | tojson) + '}<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

MISTRAL = """
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content + '\\n\\n' -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{%- set ns = namespace(turn=0, called=false, last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif -%}
  {%- if message.role == 'tool' -%}
    {%- if not ns.called %}{{ raise_exception('a tool result must follow a tool call') }}{% endif -%}
  {%- elif message.tool_calls is defined -%}
    {%- set ns.called = true -%}
  {%- else -%}
    {%- set ns.called = false -%}
    {%- if (message.role == 'user') != (ns.turn % 2 == 0) -%}
      {{ raise_exception('roles must alternate user and assistant') }}
    {%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if tools and loop.index0 == ns.last_user -%}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' -}}
  {%- elif message.tool_calls is defined -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for call in message.tool_calls -%}
      {%- if call.id | length != 9 %}{{ raise_exception('ids of tool calls must have length 9') }}{% endif -%}
      {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
      {{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') -}}
    {%- endfor -%}
    {{- eos_token -}}
  {%- elif message.role == 'assistant' -%}
    {{- ' ' + message.content | trim + eos_token -}}
  {%- elif message.role == 'tool' -%}
    {%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids of tool calls must have length 9') }}{% endif -%}
    {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}' -}}
    {{- '[/TOOL_RESULTS]' -}}
  {%- endif -%}
{%- endfor -%}
"""

_HERMES_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_MISTRAL_TOKENS = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)


def qwen25() -> PreTrainedTokenizerFast:
    """Tool calls as JSON in tags that are ordinary tokens; tool results in one user turn."""
    return make_tokenizer(QWEN25, added_tokens=_HERMES_TOKENS)


def qwen3() -> PreTrainedTokenizerFast:
    """As ``qwen25``, with thoughts that are written for turns after the last question only."""
    return make_tokenizer(QWEN3, added_tokens=(*_HERMES_TOKENS, "<think>", "</think>"))


def llama3() -> PreTrainedTokenizerFast:
    """Tool calls as bare JSON, one at a time; everything trimmed."""
    return make_tokenizer(LLAMA3, eos_token="<|eot_id|>", bos_token="<|begin_of_text|>", special_tokens=_LLAMA_TOKENS)


def mistral() -> PreTrainedTokenizerFast:
    """Tools before the last question, tool calls behind a special token, roles that alternate, ids of nine characters."""
    return make_tokenizer(MISTRAL, eos_token="</s>", bos_token="<s>", special_tokens=_MISTRAL_TOKENS)
