"""Answers of a given form over the wire, by a client that nobody here wrote: response_format, and calls on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

import piecegraph
from piecegraph.serve.messages import _block
from piecegraph.serve.parts import Part
from piecegraph.serve.tool_choice import AnyCalls
from tests.cases.checkpoints import make_byte_tokenizer, save_checkpoint
from tests.cases.serving import Served, served

CHAT = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
CHAT += "{% for m in messages %}{{ m.content }}{% endfor %}"
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["ab", "na"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
    **COMPACT,
}
OTHER: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2, 12]}},
    **COMPACT,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": 'say"g"', "parameters": OTHER}},
]
MESSAGES: Any = [{"role": "user", "content": "true or false? "}]
NAMED: Any = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("forms")
    save_checkpoint("llama", folder, has_tokenizer=False)
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    with piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=4, options={"progress": False}) as llm:
        with served(llm) as found:
            yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def ask(client: openai.OpenAI, **arguments: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 120, **arguments})


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_json_of_a_schema(client: openai.OpenAI, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    answer = ask(client, response_format=form, seed=seed, n=2)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    stream = ask(client, response_format=form, seed=seed, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    assert text == answer.choices[0].message.content
    given: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(model="tiny", input="x", text=given)
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text is not None
    assert response.text.model_dump(by_alias=True)["format"]["schema"] == SCHEMA


def test_any_object_and_the_names_of_vllm(client: openai.OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=8)
    assert answer.choices[0].message.content.startswith("{")
    answer = ask(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert answer.choices[0].message.content in ("yes", "no")
    form = {"structured_outputs": {"regex": "[0-9]{3}"}}
    plain = client.completions.create(model="tiny", prompt="x", max_tokens=9, extra_body=form)
    assert len(str(int(plain.choices[0].text.lstrip("0") or 0))) <= 3 == len(plain.choices[0].text)
    assert ask(client, response_format={"type": "text"}, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_tool_on_demand(client: openai.OpenAI, seed: int) -> None:
    choice = ask(client, tools=TOOLS, tool_choice=NAMED, seed=seed).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "f")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    deltas = [
        delta
        for part in ask(client, tools=TOOLS, tool_choice=NAMED, seed=seed, stream=True)
        for delta in part.choices[0].delta.tool_calls or ()
    ]
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert [delta.function.name for delta in deltas if delta.function.name] == ["f"]
    assert len(deltas) > 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_tool_on_demand(client: openai.OpenAI, seed: int) -> None:
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
    choice = ask(client, **given).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), schema)
    streamed = [delta for part in ask(client, **given, stream=True) for delta in part.choices[0].delta.tool_calls or ()]
    assert [(each.index, each.function.arguments) for each in streamed] == [(0, call.function.arguments)]
    several = ask(client, **{**given, "parallel_tool_calls": True}, max_completion_tokens=120)
    assert several.choices[0].message.tool_calls or several.choices[0].finish_reason == "length"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_are_told_one_by_one(size: int) -> None:
    text = '[{"name": "f", "parameters": {"x": "}, ["}}, {"name": "g", "parameters": {}}, {"name": "h", "par'
    calls = AnyCalls()
    deltas = [delta for start in range(0, len(text), size) for delta in calls.feed(text[start : start + size])]
    told = [delta["tool_calls"][0] for delta in deltas]
    assert [(call["index"], call["function"]["name"]) for call in told] == [(0, "f"), (1, "g")]
    assert json.loads(told[0]["function"]["arguments"]) == {"x": "}, ["}
    assert calls.finish() == [{"content": ', {"name": "h", "par'}]


DEEP = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("value", ["1e999", DEEP, "[" * 250 + "]" * 250, "1" * 5000])
def test_a_forced_call_that_no_client_can_read_is_text(value: str, size: int) -> None:
    bad = f'{{"name": "f", "parameters": {{"x": {value}}}}}'
    text = f'[{bad}, {{"name": "g", "parameters": {{"a": "\\"}}", "a": 2}}}}]'
    calls = AnyCalls()
    deltas = [delta for start in range(0, len(text), size) for delta in calls.feed(text[start : start + size])]
    assert [delta.get("content") for delta in [*deltas, *calls.finish()]] == [bad, None]
    (told,) = deltas[1]["tool_calls"]
    assert (told["index"], calls.num_calls, told["function"]) == (0, 1, {"name": "g", "arguments": '{"a": 2}'})


@pytest.mark.parametrize("value", ["1e999", DEEP])
def test_arguments_that_no_object_holds_are_text(value: str) -> None:
    block = _block(Part("call", 0, text=f'{{"x": {value}}}', name="f", number="1"))
    assert block == {"type": "text", "text": f'{{"x": {value}}}'}
    assert _block(Part("call", 0, text='{"x": 1', name="f", number="1"))["input"] == {}  # which was cut off


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema comes with"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}}, "only with that"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objet"}}}},
            "PG660.*Invalid type: objet",
        ),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": NAMED}, "has one form"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs is not one form"),
        ({"extra_body": {"structured_outputs": {"xml": "x"}}}, "structured_outputs is"),
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": TOOLS}, r"tools\[0\].function.strict"),
        ({"tools": TOOLS[1:]}, "response_template"),
        ({"tools": TOOLS[1:], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, server: Served, arguments: dict[str, Any], why: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=why):
            ask(client, **arguments, stream=stream)
    assert server.is_idle()
