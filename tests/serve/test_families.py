"""Calls and reasoning as families of models write them, letter by letter and in one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.serve.parsing import AnswerParser, ParsedAnswer, response_template_of

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHATML = "<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
HERMES_CHAT = "<|im_start|> ... <tool_call>{'name': }</tool_call>"
QWEN_CODER_CHAT = "<|im_start|> ... <tool_call><function=x></tool_call>"
LLAMA_CHAT = """<|start_header_id|> {"name": function name, "parameters": dictionary} '{"name": "' '"parameters": ' """
DEEPSEEK_CHAT = "<｜User｜> ... <｜Assistant｜> ... <｜tool▁calls▁begin｜>"
GPT_OSS_CHAT = "<|start|> ... <|channel|>"

Calls = list[tuple[str, Any]]
FAMILIES: dict[str, tuple[str, str, str, tuple[str, str, Calls]]] = {
    "hermes": (
        HERMES_CHAT,
        CHATML,
        '<think>hm</think>Well.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        ("hm", "Well.", [("f", {"x": 1})]),
    ),
    "hermes, several": (
        HERMES_CHAT,
        CHATML,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ("", "", [("f", {}), ("g", {})]),
    ),
    "qwen coder": (
        QWEN_CODER_CHAT,
        CHATML,
        "So.\n<tool_call>\n<function=f>\n<parameter=x>\na b\n</parameter>\n</function>\n</tool_call>",
        ("", "So.", [("f", {"x": "a b"})]),
    ),
    "llama": (
        LLAMA_CHAT,
        LLAMA,
        '{"name": "f", "parameters": {"x": {"y": "}"}, "z": [1]}}',
        ("", "", [("f", {"x": {"y": "}"}, "z": [1]})]),
    ),
    "llama, marked": (
        LLAMA_CHAT,
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>',
        ("", "", [("f", {})]),
    ),
    "llama, text": (
        LLAMA_CHAT,
        LLAMA,
        'Write {"name": "f", "parameters": {}}, or {',
        ("", 'Write {"name": "f", "parameters": {}}, or {', []),
    ),
    "llama, other json": (LLAMA_CHAT, LLAMA, '{"name": 7}', ("", '{"name": 7}', [])),
    "mistral": (
        "[TOOL_CALLS]",
        "[INST] hi[/INST]",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]',
        ("", "", [("f", {"x": "]"}), ("g", {})]),
    ),
    "mistral, one by one": (
        "[TOOL_CALLS] [ARGS]",
        "[INST]hi[/INST]",
        '[THINK]hm[/THINK]Well.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}',
        ("hm", "Well.", [("f", {"x": 1}), ("g", {})]),
    ),
    "deepseek": (
        DEEPSEEK_CHAT,
        "<｜User｜>hi<｜Assistant｜><think>\n",
        "hm</think>Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("hm", "Well.", [("f", {"x": 1}), ("g", {})]),
    ),
    "deepseek, newer": (
        DEEPSEEK_CHAT,
        "<｜User｜>hi<｜Assistant｜></think>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "<"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [("f", {"x": "<"}), ("g", {})]),
    ),
    "gpt-oss": (
        GPT_OSS_CHAT,
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        ("hm", "Well.", [("f", {"x": 1})]),
    ),
    "gpt-oss, other header": (
        GPT_OSS_CHAT,
        "<|start|>assistant",
        " to=functions.f<|channel|>commentary json<|message|>{}",
        ("", "", [("f", {})]),
    ),
    "gpt-oss, text": (
        GPT_OSS_CHAT,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So < it > is.<|return|>",
        ("hm", "So < it > is.", []),
    ),
    "gpt-oss, no call": (
        GPT_OSS_CHAT,
        "<|start|>assistant",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{oops<|call|>",
        ("", "{oops", []),
    ),
    "mistral, cut off": ("[TOOL_CALLS]", "[/INST]", 'a[TOOL_CALLS][{"name":', ("", 'a[TOOL_CALLS][{"name":', [])),
    "mistral, no call": ("[TOOL_CALLS]", "[/INST]", '[TOOL_CALLS][{"x": 1}]', ("", '[TOOL_CALLS][{"x": 1}]', [])),
}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_writes(name: str, size: int) -> None:
    chat, prompt, text, (reasoning, content, calls) = FAMILIES[name]
    model = SimpleNamespace(config=SimpleNamespace(model_type="unknown"))
    template = response_template_of(SimpleNamespace(chat_template=chat), model)
    assert template is not None
    parser, parsed = AnswerParser(template, prompt, TOOLS), ParsedAnswer()
    for start in range(0, len(text), size):
        for delta in parser.feed(text[start : start + size]):
            parsed.add(delta)
    for delta in parser.finish():
        parsed.add(delta)
    assert (parsed.reasoning, parsed.content.strip()) == (reasoning, content)
    called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parsed.tool_calls]
    assert called == calls


def test_families_that_nobody_knows() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="unknown"))
    for chat in (None, "", "{{ messages }}", {"default": "[TOOL_CALLS]"}):
        assert response_template_of(SimpleNamespace(chat_template=chat), model) is None
