"""Tool calls and reasoning, told apart from the answer, in one and while they stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from openai.types import responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

import piecegraph
from piecegraph.serve.parsing import AnswerParser, ParsedAnswer, response_template_of
from tests.cases.script_llm import write_script_llm
from tests.cases.serving import Served, served

WORDS = "<unk> <user> <tools> <tool> hi result <assistant> <think> hmm so </think> sunny then <tool_call>".split()
WORDS += ['{"name":', '"f",', '"arguments":', '{"x":', "1}}", "</tool_call>", "<end>"]
CHAT = (
    "{% for tool in tools or [] %}<tools> {{ tool.function.name }} {% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<tool> {{ m.content }} {{ m.tool_call_id }} "
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }} "
    "{% else %}<user> {{ m.content }} {% endif %}{% endfor %}{% if reasoning_effort %}result {% endif %}<assistant>"
)
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_script_llm(tmp_path_factory.mktemp("script"), WORDS, chat_template=CHAT, response_template=TEMPLATE)
    with piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=2, options={"progress": False}) as llm:
        with served(llm) as found:
            yield found


@pytest.fixture(scope="module")
def client(talker: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.address}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_a_call_beside_reasoning_and_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content.strip() == "hmm so"  # type: ignore[attr-defined]
    assert str(choice.message.content).strip() == "sunny then"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "f", {"x": 1})
    # The next turn: the call, and what came of it.
    again: Any = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "result"}]
    again[1] = again[1].model_dump(exclude_none=True)
    assert client.chat.completions.create(model="tiny", messages=again, tools=TOOLS, temperature=0).choices


def test_the_same_while_it_streams(client: openai.OpenAI) -> None:
    said = {"content": "", "reasoning_content": ""}
    calls: list[Any] = []
    reasons = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            for name in said:
                said[name] += getattr(choice.delta, name, None) or ""
            calls += choice.delta.tool_calls or []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert {name: text.strip() for name, text in said.items()} == {
        "content": "sunny then",
        "reasoning_content": "hmm so",
    }
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "f", '{"x": 1}')]
    assert reasons == ["tool_calls"]


@pytest.mark.parametrize("arguments", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(client: openai.OpenAI, arguments: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, **arguments)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert str(choice.message.content).strip().startswith("sunny then <tool_call>")


def test_what_is_refused(client: openai.OpenAI, running: Served) -> None:
    for arguments, why in (
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "none of the tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"extra_body": {"skip_special_tokens": True}}, "skip_special_tokens is not supported"),
        ({"tools": [{"type": "custom"}]}, r"tools\[0\]"),
    ):
        given: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, **arguments}
        with pytest.raises(openai.BadRequestError, match=why):
            client.chat.completions.create(**given)
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
    status, answer, _ = running.post("/v1/chat/completions", body)  # a model whose calls nobody can read
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "has no response_template" in answer["error"]["message"]


def test_how_long_a_model_thinks_is_told_to_its_template(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    lengths = [
        client.chat.completions.create(**asked, **how).usage.prompt_tokens  # type: ignore[union-attr]
        for how in ({}, {"reasoning_effort": "low"})
    ]
    answer = client.responses.create(model="tiny", input="hi", reasoning={"effort": "low"}, temperature=0)
    assert lengths[1] == lengths[0] + 1 == answer.usage.input_tokens  # type: ignore[union-attr]
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"


def test_calls_are_of_the_published_types(talker: Served) -> None:
    for path, body, kind, events in (
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}, ChatCompletion, ChatCompletionChunk),
        ("/v1/responses", {"input": "hi", "tools": FUNCTIONS}, responses.Response, responses.ResponseStreamEvent),
        ("/v1/messages", {**ASKED, "max_tokens": 40}, anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    ):
        asked = {**body, "model": "tiny", "temperature": 0}
        asked.pop("extra_body", None)
        status, answer, _ = talker.post(path, asked)
        assert status == 200, answer
        kind.model_validate(answer, strict=True)  # type: ignore[attr-defined]
        for line in talker.post(path, {**asked, "stream": True})[1].splitlines():
            if line.startswith("data: {"):
                TypeAdapter(events).validate_json(line[6:])


FUNCTIONS: Any = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
]


def items_of(response: Any) -> list[tuple[Any, ...]]:
    """What the items of a response say."""
    return [
        (item.type, item.name, json.loads(item.arguments))
        if item.type == "function_call"
        else (item.type, item.content[0].text.strip())
        for item in response.output
    ]


def test_calls_and_reasoning_as_responses_have_them(client: openai.OpenAI) -> None:
    expected = [("reasoning", "hmm so"), ("message", "sunny then"), ("function_call", "f", {"x": 1})]
    asked: Any = {"model": "tiny", "tools": FUNCTIONS, "temperature": 0}
    answer = client.responses.create(**asked, input="hi")
    assert (items_of(answer), answer.status) == (expected, "completed")
    with client.responses.stream(**asked, input="hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert items_of(final) == expected
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    # The next turn: all of it comes back, with what came of the call.
    call = answer.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "result"}
    before = [item.model_dump(exclude_none=True) for item in answer.output]
    again: Any = [{"role": "user", "content": "hi"}, *before, result]
    assert items_of(client.responses.create(**asked, input=again)) == expected
    for arguments, why in (
        ({"tool_choice": {"type": "function", "name": "g"}}, "none of the tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            client.responses.create(**asked, input="hi", **arguments)
    nothing = client.responses.create(**{**asked, "tool_choice": "none"}, input="hi")
    assert [item.type for item in nothing.output] == ["reasoning", "message"]


@pytest.fixture(scope="module")
def claude(talker: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=talker.address, api_key="none", max_retries=0, timeout=60) as found:
        yield found


ASKED: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "extra_body": {"temperature": 0}}
ASKED["tools"] = [{"name": "f", "description": "a tool", "input_schema": {"type": "object", "properties": {}}}]


def blocks_of(message: Any) -> list[tuple[Any, ...]]:
    """What the blocks of a message say."""
    told = {"thinking": ("thinking",), "text": ("text",), "tool_use": ("name", "input")}
    found = [(block.type, *(getattr(block, name) for name in told[block.type])) for block in message.content]
    return [tuple(each.strip() if isinstance(each, str) else each for each in block) for block in found]


def test_calls_and_reasoning_as_anthropic_has_them(claude: anthropic.Anthropic) -> None:
    expected = [("thinking", "hmm so"), ("text", "sunny then"), ("tool_use", "f", {"x": 1})]
    answer = claude.messages.create(**ASKED)
    assert (blocks_of(answer), answer.stop_reason) == (expected, "tool_use")
    with claude.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (blocks_of(final), final.stop_reason) == (expected, "tool_use")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    # The next turn: all of it comes back, with what came of the call.
    call = next(block for block in answer.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "result"}]}
    said = [block.model_dump(exclude_none=True) for block in answer.content]
    again: Any = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**{**ASKED, "messages": again}).stop_reason == "tool_use"
    counted = claude.messages.count_tokens(model="tiny", messages=again, tools=ASKED["tools"])
    assert counted.input_tokens > claude.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens


def test_calls_that_an_anthropic_client_does_not_want(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**ASKED, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.stop_reason == "end_turn"
    for choice, why in (
        ({"type": "tool", "name": "g"}, "none of the tools"),
        ({"type": "tool"}, "a name comes with"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "tool_choice.disable_parallel_tool_use is not supported"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=why):
            claude.messages.create(**ASKED, tool_choice=choice)


def read(pieces: list[str]) -> tuple[str, list[Any]]:
    parser = AnswerParser(TEMPLATE, "<assistant>", TOOLS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    return "".join(delta.get("content", "") for delta in deltas), calls


@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_is_no_call_is_text(size: int) -> None:
    def cut(text: str) -> list[str]:
        return [text[start : start + size] for start in range(0, len(text), size)]

    for whole in ('a <tool_call>{"name": oops}</tool_call> b', 'a<tool_call>{"x": 1}</tool_call> b', "a <tool_call"):
        assert read(cut(whole)) == (whole, [])
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    text, calls = read(cut(good))
    assert text == ""
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "f"), (1, "g")]


@pytest.mark.parametrize("given", ['"oops"', '"{\\"x\\": NaN}"', '"[1]"', "[1]", "3", f'"{"[" * 5000}"'])
def test_arguments_that_are_no_object_are_no_call(given: str) -> None:
    whole = f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'
    assert read([whole]) == (whole, [])


@pytest.mark.parametrize(("given", "told"), [('"{\\"x\\":1}"', '{"x":1}'), ('""', "{}"), ("null", "{}")])
def test_arguments_that_a_model_writes_as_a_text(given: str, told: str) -> None:
    text, (call,) = read([f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'])
    assert (text, call["function"]) == ("", {"name": "f", "arguments": told})


def test_a_family_that_transformers_knows() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    template = response_template_of(SimpleNamespace(), model)
    if template is None:
        pytest.skip("this version of transformers knows no families")
    parser = AnswerParser(template, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", TOOLS)
    text = '<think>\nhmm\n</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    parsed = ParsedAnswer()
    for delta in [delta for letter in text for delta in parser.feed(letter)] + parser.finish():
        parsed.add(delta)
    assert (parsed.reasoning.strip(), parsed.content.strip()) == ("hmm", "So.")
    assert [call["function"] for call in parsed.tool_calls] == [{"name": "f", "arguments": '{"x": 1}'}]


def test_reasoning_that_the_template_began() -> None:
    parser = AnswerParser(TEMPLATE, "<user> hi <assistant><think>", [])
    assert parser.feed("hmm </think> yes") == [{"reasoning_content": "hmm "}, {"content": " yes"}]
