"""An answer says the same however it is cut, and nothing of it is lost, be its calls such that can be read or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.serve.parsing import AnswerParser, ParsedAnswer, deltas, response_template_of
from tests.serve.test_families import CHATML, DEEPSEEK_CHAT, GPT_OSS_CHAT, LLAMA, LLAMA_CHAT

PARAMETERS = {"type": "object", "properties": {"a": {"type": "array"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
NO_JSON = ("[NaN]", "[1e999]", "[" * 250 + "]" * 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family writes things, each with a hole."""

    chat: str | None = None
    model_type: str = "unknown"
    prompt: str
    call: str
    said: str = "%s"
    thought: str | None = None
    broken: tuple[str, ...] = (*NO_JSON, "oops", "<think>hm</think>[THINK]hm[/THINK]", '"')
    shows_marks: bool = True
    is_call_alone: bool = False
    """Whether a call is all of an answer."""

    def parser(self, *, has_tools: bool = True) -> AnswerParser:
        model = SimpleNamespace(config=SimpleNamespace(model_type=self.model_type))
        template = response_template_of(SimpleNamespace(chat_template=self.chat), model)
        assert template is not None
        return AnswerParser(template, self.prompt, TOOLS if has_tools else [])

    def no_call(self, value: str) -> tuple[str, str]:
        """A call that cannot be read, and what is told of it."""
        text = self.call % value
        return text, text if self.shows_marks else f'{{"a": {value}}}'


FAMILIES = {
    "qwen3": Family(
        model_type="qwen3",
        prompt=CHATML,
        call='\n<tool_call>\n{"name": "f", "arguments": {"a": %s}}\n</tool_call>',
        thought="<think>%s</think>",
    ),
    "qwen3_5": Family(
        model_type="qwen3_5",
        prompt=CHATML,
        call="<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
        thought="<think>%s</think>",
        broken=NO_JSON,
    ),
    "gemma4": Family(
        model_type="gemma4",
        prompt="<|turn>model\n",
        call="<|tool_call>call:f{a:%s}<tool_call|>",
        thought="<|channel>thought\n%s<channel|>",
    ),
    "llama": Family(chat=LLAMA_CHAT, prompt=LLAMA, call='{"name": "f", "parameters": {"a": %s}}', is_call_alone=True),
    "mistral": Family(
        chat="[TOOL_CALLS]",
        prompt="[/INST]",
        call='[TOOL_CALLS][{"name": "f", "arguments": {"a": %s}}]</s>',
        thought="[THINK]%s[/THINK]",
    ),
    "mistral, one by one": Family(
        chat="[TOOL_CALLS] [ARGS]",
        prompt="[/INST]",
        call='[TOOL_CALLS]f[ARGS]{"a": %s}</s>',
        thought="[THINK]%s[/THINK]",
    ),
    "deepseek": Family(
        chat=DEEPSEEK_CHAT,
        prompt="<｜Assistant｜>",
        call='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": %s}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought="<think>%s</think>",
    ),
    "gpt-oss": Family(
        chat=GPT_OSS_CHAT,
        prompt="<|start|>assistant",
        call='<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": %s}<|call|><|start|>assistant',
        said="<|channel|>final<|message|>%s<|end|><|start|>assistant",
        thought="<|channel|>analysis<|message|>%s<|end|><|start|>assistant",
        shows_marks=False,
    ),
}

Told = tuple[str, str, list[tuple[str, Any]]]


def read(parser: AnswerParser, pieces: list[str]) -> Told:
    """What an answer in pieces says: the content, the reasoning and the calls."""
    parsed = ParsedAnswer()
    for number, piece in enumerate(pieces, start=1):
        for delta in deltas(parser, piece, is_last=number == len(pieces)):
            parsed.add(delta)
    assert parser.num_calls == len(parsed.tool_calls)
    called = [call["function"] for call in parsed.tool_calls]
    return parsed.content, parsed.reasoning, [(each["name"], json.loads(each["arguments"])) for each in called]


def cut(text: str, sizes: list[int]) -> list[str]:
    """Pieces of these sizes, and the rest."""
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [*found, text]


def read_in_all_ways(family: Family, text: str, sizes: list[int], *, has_tools: bool = True) -> Told:
    """What an answer says, which is the same in one, letter by letter and in pieces."""
    whole = read(family.parser(has_tools=has_tools), [text])
    assert read(family.parser(has_tools=has_tools), [*text, ""]) == whole
    assert read(family.parser(has_tools=has_tools), cut(text, sizes)) == whole
    return whole


SIZES = st.lists(st.integers(0, 12), max_size=30)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_text_says_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    values = ("[1]", *family.broken)
    things = [family.call % value for value in values] + [(family.thought or "%s") % "hm", family.said % "So."]
    ends = st.integers(0, 80)
    part = st.builds(lambda thing, start, end: thing[start:end], st.sampled_from(things), ends, ends)
    text = "".join(data.draw(st.lists(st.sampled_from(things) | part | st.sampled_from(" \n<[{}é"), max_size=8)))
    read_in_all_ways(family, text, data.draw(SIZES), has_tools=data.draw(st.booleans()))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_is_lost_around_what_is_no_call(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    texts: list[str] = []
    content, reasoning, calls = "", "", []
    kinds = ["said", "call", "no call"] + (["thought"] if family.thought else [])
    for kind in data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=1 if family.is_call_alone else 6)):
        if kind == "no call":
            text, told = family.no_call(data.draw(st.sampled_from(family.broken)))
            texts, content = [*texts, text], content + told
        elif kind == "call":
            texts, calls = [*texts, family.call % "[1]"], [*calls, ("f", {"a": [1]})]
        elif kind == "thought":
            texts, reasoning = [*texts, str(family.thought) % "hm"], reasoning + "hm"
        else:
            texts, content = [*texts, family.said % "So."], content + "So."
    assert read_in_all_ways(family, "".join(texts), data.draw(SIZES)) == (content, reasoning, calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_deeper_than_python_reads(name: str) -> None:
    family = FAMILIES[name]
    text, told = family.no_call("[" * 3000 + "]" * 3000)
    assert read(family.parser(), [text]) == (told, "", [])
    deep = "[" * 150 + "]" * 150
    assert read(family.parser(), [family.call % deep]) == ("", "", [("f", {"a": json.loads(deep)})])


def test_a_list_without_calls_or_with_one_that_is_none() -> None:
    for listed in ("[]", '[{"name": "f", "arguments": {}}, {"name": 7, "arguments": {}}]'):
        text = f"[TOOL_CALLS]{listed}</s>"
        assert read_in_all_ways(FAMILIES["mistral"], text, [5, 20]) == (text, "", [])


def test_what_the_prompt_began_is_not_told() -> None:
    template = {
        "start_anchor": "<assistant>",
        "fields": {
            "tool_calls": {"open": "<call>", "close": "</call>", "content": "json"},
            "content": {"content": "text", "optional": False},
        },
    }
    for pieces in (["oops</call> so"], list("oops</call> so")):
        assert read(AnswerParser(template, "<assistant><call>", TOOLS), pieces) == ("oops</call> so", "", [])
    assert read(AnswerParser(template, "<assistant>", TOOLS), [""]) == ("", "", [])
