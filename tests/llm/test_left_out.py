"""What chat templates leave out is found by what they write, whichever way they read a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from piecegraph.errors import ModelError
from piecegraph.llm.run.left_out import left_out
from piecegraph.llm.run.prompts import chat_tokens
from tests.cases.checkpoints import make_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USERS = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
WHOLE = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
ITEMS = "{% for m in messages %}{% for name, value in m.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}"
FIRST_CALL = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}"
FIRST_CALL += "{% endif %}{% endfor %}"
LATE_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' %}{{ messages[0].content }}"
    "{% endif %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)
LAST_CALLS = (
    "{% for m in messages %}{{ m.content }}{% if loop.last %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)
STRICT = "{% for m in messages %}{% if m.content | length > 3 %}{{ raise_exception('long') }}{% endif %}{% endfor %}"
BY_MACRO = "{% macro show(m) %}{{ m['content'] ~ m['tool_calls'] }}{% endmacro %}"
BY_MACRO += "{% for m in messages %}{{ show(m) }}{% endfor %}"

SYSTEM = {"role": "system", "content": "abc"}
USER = {"role": "user", "content": "def"}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "ghi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def calls(*arguments: Any) -> dict[str, Any]:
    called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": "", "tool_calls": called}


def found(template: str, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str | None:
    tokenizer = make_tokenizer()

    def write(some: Sequence[Mapping[str, Any]], marked: Any) -> str:
        return str(tokenizer.apply_chat_template(list(some), tools=marked, tokenize=False, chat_template=template))

    return left_out(write, messages, tools)


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        (PLAIN, [SYSTEM, USER, RESULT], None),
        (PLAIN, [USER, calls({"x": 1}), RESULT], "messages[1].tool_calls"),
        (USERS, [USER, {**USER, "name": "someone"}], None),
        (USERS, [SYSTEM, USER], "messages[0].content"),
        (USERS, [USER, RESULT], "messages[1].content"),
        (USERS, [{"role": "developer", "content": "abc"}, USER], "messages[0].content"),
        (WHOLE, [SYSTEM, USER, calls({"x": 1}, {"x": 2}), RESULT], None),
        (ITEMS, [USER, calls({}), RESULT], None),
        (BY_MACRO, [USER, calls({}), RESULT], None),
        (FIRST_CALL, [USER, calls({"x": 1})], None),
        (FIRST_CALL, [USER, calls({"x": 1}, {"x": 1})], "messages[1].tool_calls[1]"),
        (FIRST_CALL, [USER, calls({"y": [1, None, "z"]})], "messages[1].tool_calls"),
        (LATE_SYSTEM, [SYSTEM, USER, calls({}), RESULT], None),  # as it does for the next question
        (LAST_CALLS, [USER, calls({"x": 1}), RESULT, calls({"x": 2}), RESULT], None),  # as it did then
        (STRICT, [SYSTEM, {"role": "user", "content": ""}], None),  # it refuses what is marked
    ],
)
def test_what_is_left_out(template: str, messages: list[dict[str, Any]], place: str | None) -> None:
    assert found(template, messages) == place


def test_tools_that_are_left_out() -> None:
    assert found(WHOLE, [USER], TOOLS) is None
    assert found("{% if tools %}You have tools.{% endif %}" + PLAIN, [USER], TOOLS) == "tools"
    assert found("{% for tool in tools %}{{ tool.name }}{% endfor %}", [USER], [{"name": "f"}]) is None
    # Tools of a later question are shown there.
    late = "{% for m in messages %}{% if loop.last and m.role == 'user' %}{{ tools }}{% endif %}{{ m }}{% endfor %}"
    assert found(late, [USER, calls({}), RESULT], TOOLS) is None


def test_a_conversation_of_which_a_part_would_be_lost_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN
    for messages, tools, where in (
        ([USER, calls({})], None, r"messages\[1\]\.tool_calls"),
        ([USER], TOOLS, "tools"),
    ):
        with pytest.raises(ModelError, match=f"PG667 .* leaves out what is said at {where}: the model would not see"):
            chat_tokens(tokenizer, messages, tools, {})
