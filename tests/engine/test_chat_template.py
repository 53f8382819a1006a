"""Chat templates render as transformers renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from front_parts import byte_level

from front.text.tokenizer import Tokenizer

# Written for this test in the manner of the Qwen3 template: a tool list, reasoning kept only in the last turn.
QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Tools:" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last_query < 0 and message.role == 'user' and message.content is string %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# In the manner of DeepSeek's: flags in a namespace, special tokens from the tokenizer, trimmed contents.
DEEPSEEK_LIKE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] | trim }}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}{{ '<|Assistant|>' + message['content'] | trim + eos_token }}{%- endif %}"
    "{%- endfor -%}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% if thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)

# The extras: loop controls, generation blocks, blocks on their own lines, filters.
EXTRAS = """{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 6 %}{% break %}{% endif %}
    {% generation %}{{ message.role | upper }}: {{ message.content | trim }}{% endgeneration %}
    {% set extra = dict(a=1, b=[1, 2]) %}
    {{ extra | tojson(indent=2) }} {{ "é<&>" | tojson }} {{ {'z': 1, 'a': none} | tojson(sort_keys=true) }}
{% endfor %}
{{ documents if documents else 'none' }} {{ undefined_name }}|
"""

TEMPLATES = {"qwen": QWEN_LIKE, "deepseek": DEEPSEEK_LIKE, "extras": EXTRAS}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "a < b & ü", "parameters": {}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi there  "}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "ok ", "name": None},
        {"role": "user", "content": "c 日本"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "It is sunny.", "reasoning": "hm\n"},
    ],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nThe answer"},
    ],
]


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = byte_level(tmp_path_factory.mktemp(request.param))
    (directory / "chat_template.jinja").write_text(TEMPLATES[request.param])
    return Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False, "thinking": True}, {"tools": [TOOL]}])
def test_rendering_equals_transformers(both, conversation, add_generation_prompt: bool, kwargs) -> None:
    ours, theirs = both
    expected = theirs.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
    )
    assert ours.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, **kwargs) == expected


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_continuing_equals_transformers(both, conversation) -> None:
    ours, theirs = both
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    expected = theirs.apply_chat_template(conversation, tokenize=False, **flags)
    assert ours.apply_chat_template(conversation, **flags) == expected


def test_encoding_the_text_equals_tokenizing_at_once(both) -> None:
    ours, theirs = both
    expected = theirs.apply_chat_template(CONVERSATIONS[1], add_generation_prompt=True, return_dict=False)
    text = ours.apply_chat_template(CONVERSATIONS[1])
    assert ours.encode(text, add_special_tokens=False) == expected


def test_parts_of_content_are_continued(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content[-1].text }}!{% endfor %}")
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc "}]}]
    text = Tokenizer(tmp_path).apply_chat_template(messages, continue_final_message=True, add_generation_prompt=False)
    assert text == "abc "


def test_named_templates(tmp_path: Path) -> None:
    byte_level(tmp_path)
    config = '{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    messages = [{"role": "user", "content": "x"}]
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.chat_template == "D"
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[TOOL]) == "T"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ messages[0].content }}") == "x"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file T")
    (tmp_path / "chat_template.jinja").write_text("file D")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "file D"
    assert tokenizer.apply_chat_template(messages, tools=[TOOL]) == "file T"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must\\nalternate') }}", [{"role": "user"}], "chat template: roles must alternate"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], "cannot render"),
        ("{{ messages[0].absent.more }}", [{"role": "user", "content": "x"}], "no attribute 'absent'"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "x"}], "unsafe"),
        ("{{ messages.append(1) }}", [{"role": "user", "content": "x"}], "is unsafe"),
        ("x", [], "at least one message"),
        ("x", [{"content": "x"}], "needs a role"),
        ("x", ["hello"], "must hold mappings"),
        ("x", [{"role": "user", "content": object()}], "JSON values only"),
        ("{% for %}", [{"role": "user", "content": "x"}], "does not parse"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, template: str, messages, message: str) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.apply_chat_template(messages, chat_template=template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "content", "flags", "message"),
    [
        ("{{ messages[0].content }}", "x", {"add_generation_prompt": True}, "cannot both be true"),
        ("{{ messages[0].content }}", None, {}, "no text to continue"),
        ("fixed", "x", {}, "leaves out the last message"),
    ],
)
def test_what_cannot_be_continued(tmp_path: Path, template: str, content, flags, message: str) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=template,
            continue_final_message=True,
            **{"add_generation_prompt": False, **flags},
        )
