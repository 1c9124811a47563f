"""Models whose chat templates know less than an API: what cannot reach the model is refused by its own name, in each
API, and what a form alone can do is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import piecegraph
from tests.cases.byte_llm import write_byte_llm
from tests.cases.serving import Served, served

PLAIN = "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
USER = {"role": "user", "content": "hi"}
SCHEMA: Any = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": False}
SCHEMA["x-guidance"] = {"whitespace_flexible": False}
FUNCTION = {"name": "f", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_byte_llm(tmp_path_factory.mktemp("plain"), chat_template=PLAIN)
    with piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=2, options={"progress": False}) as llm:
        with served(llm) as found:
            yield found


CHAT: Any = {"model": "tiny", "messages": [USER], "max_tokens": 40}
RESPONSES: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 40}
MESSAGES: Any = {"model": "tiny", "messages": [USER], "max_tokens": 40}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_are_forced_whatever_the_template(plain: Served, choice: Any) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    more = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    status, answer, _ = plain.post("/v1/chat/completions", {**CHAT, **more})
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"x": 1})
    choice = choice if isinstance(choice, str) else {"type": "function", "name": "f"}
    more = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": choice, "parallel_tool_calls": False}
    status, answer, _ = plain.post("/v1/responses", {**RESPONSES, **more})
    assert [item["type"] for item in answer["output"]] == ["function_call"]


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "f"}])
def test_calls_of_anthropic_are_forced_whatever_the_template(plain: Served, choice: Any) -> None:
    more = {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": choice}
    status, answer, _ = plain.post("/v1/messages", {**MESSAGES, **more})
    assert status == 200, answer
    assert [(block["name"], block["input"]) for block in answer["content"]] == [("f", {"x": 1})]


def test_thinking_that_a_template_knows_nothing_of(plain: Served) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = MESSAGES if path == "/v1/messages" else {"model": "tiny", "messages": [USER]}
        assert plain.post(path, {**body, "thinking": {"type": "disabled"}})[0] == 200
        status, answer, _ = plain.post(path, {**body, "thinking": {"type": "adaptive"}})
        why = "thinking is not supported: the chat template of this model does not read enable_thinking"
        assert (status, answer["error"]["message"]) == (400, why)
    for path, body, param in (
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {**RESPONSES, "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ):
        status, answer, _ = plain.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, {"role": "assistant", "content": "ok", "tool_calls": [CALL]}], "messages[1].tool_calls"),
        ([{"role": "system", "content": "be kind"}, USER], "messages[0].content"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_would_not_reach_the_model_is_refused(plain: Served, path: str, messages: Any, param: str) -> None:
    body = {**CHAT, "messages": messages} if path != "/tokenize" else {"messages": messages}
    status, answer, _ = plain.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert f"the chat template of the model leaves out what is said at {param}" in answer["error"]["message"]


def test_what_would_not_reach_the_model_is_refused_in_other_apis(plain: Served) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "done"}
    turns = [USER, {"role": "assistant", "content": [{"type": "text", "text": "ok"}, TOOL_USE]}]
    for body, place in (
        ({"messages": [*turns, {"role": "user", "content": [result]}]}, "messages[1].content[1]"),
        ({"system": "be kind"}, "system"),
    ):
        status, answer, _ = plain.post("/v1/messages", {**MESSAGES, **body})
        assert (status, f"is said at {place}:" in answer["error"]["message"]) == (400, True), answer
    said = {"role": "assistant", "content": "ok"}
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    for body, place in (
        ({"input": [USER, said, CALL_ITEM, output]}, "input[2]"),
        ({"instructions": "be kind"}, "instructions"),
    ):
        status, answer, _ = plain.post("/v1/responses", {**RESPONSES, **body})
        assert (status, answer["error"]["param"]) == (400, place), answer


@pytest.mark.parametrize("knows_it", [False, True])
def test_developers_are_systems_to_a_template_that_does_not_know_them(
    plain: Served, monkeypatch: pytest.MonkeyPatch, *, knows_it: bool
) -> None:
    roles = ["system", "user"] + (["developer"] if knows_it else [])
    template = f"{{% for m in messages if m.role in {roles} %}}{{{{ m.role }}}}: {{{{ m.content }}}};{{% endfor %}}"
    monkeypatch.setattr(plain.llm.tokenizer, "chat_template", template)
    status, answer, _ = plain.post("/tokenize", {"messages": [{"role": "developer", "content": "be kind"}, USER]})
    text = plain.llm.tokenizer.decode(answer["tokens"])
    assert (status, text) == (200, f"{roles[-1] if knows_it else 'system'}: be kind;user: hi;")


def test_what_a_template_may_leave_out(plain: Served) -> None:
    """A speaker's name, what a model thought, and the id of a call."""
    messages = [
        {**USER, "name": "someone"},
        {"role": "assistant", "content": "ok", "reasoning_content": "because"},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "done"},
    ]
    bare = [{name: message[name] for name in ("role", "content")} for message in messages]
    status, answer, _ = plain.post("/tokenize", {"messages": messages})
    assert (status, answer) == plain.post("/tokenize", {"messages": bare})[:2]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({**USER, "tool_calls": [CALL]}, "tool_calls"),
        ({**USER, "tool_calls": []}, "tool_calls"),
        ({**USER, "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "assistant", "content": "ok", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "tool", "content": "ok", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "system", "content": "ok", "reasoning_content": "hm"}, "reasoning_content"),
    ],
)
def test_fields_of_other_roles(running: Served, message: dict[str, Any], field: str) -> None:
    for path, body in (("/v1/chat/completions", {**CHAT}), ("/tokenize", {})):
        status, answer, _ = running.post(path, {**body, "messages": [USER, message]})
        assert (status, answer["error"]["param"]) == (400, f"messages[1].{field}")
        assert f"and this is one of role {message['role']}" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", TOOL_USE),
        ("user", {"type": "thinking", "thinking": "hm"}),
        ("assistant", {"type": "tool_result", "tool_use_id": "c"}),
    ],
)
def test_blocks_of_other_roles(running: Served, role: str, block: dict[str, Any]) -> None:
    turn = {"role": role, "content": [{"type": "text", "text": "ax"}, block]}
    status, answer, _ = running.post("/v1/messages", {**MESSAGES, "messages": [turn, USER]})
    assert (status, answer["error"]["message"].startswith("messages[0].content[1] comes in")) == (400, True)
