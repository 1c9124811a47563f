"""How families of models mark tool calls and reasoning, where neither the tokenizer nor transformers says so.

Each is recognised by its chat template, which holds the same marks, and described as transformers' parser reads it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_DEFAULTS = {"role": "assistant"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# {"name": "f", "parameters": {}} is the whole message; only its first characters tell it from text.
_LLAMA = {
    "defaults": _DEFAULTS,
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\A\s*(?:<\|python_tag\|>)?\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"parameters"\s*:',
            "close_pattern": r"\}\s*(?:<\|eom_id\|>|<\|eot_id\|>)?\Z",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {"content": "text"},
    },
}

_MISTRAL_REASONING = {"open": "[THINK]", "close": "[/THINK]", "content": "text"}
_MISTRAL_ANCHORS = ["[/INST]", "[/TOOL_RESULTS]"]

# [TOOL_CALLS][{"name": "f", "arguments": {}}]
_MISTRAL_LIST = {
    "defaults": _DEFAULTS,
    "start_anchor": _MISTRAL_ANCHORS,
    "fields": {
        "reasoning_content": _MISTRAL_REASONING,
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close": "</s>",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        "content": {"content": "text"},
    },
}

# [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}
_MISTRAL_ONE_BY_ONE = {
    "defaults": _DEFAULTS,
    "start_anchor": _MISTRAL_ANCHORS,
    "fields": {
        "reasoning_content": _MISTRAL_REASONING,
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\s]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {"content": "text"},
    },
}

# <think>...</think>, then calls; how they look depends on the version.
_DEEPSEEK = {
    "defaults": _DEFAULTS,
    "start_anchor": "<｜Assistant｜>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
            r"(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n|(?!function<)(?P<name>[^<]+)<｜tool▁sep｜>)",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>"
            r"(?:\s*<｜tool▁calls▁end｜>|(?=\s*<｜tool▁call▁begin｜>)|\Z)",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {"content": "text"},
    },
}

# Messages of one turn, each in a channel; a call says in its header whom it is for.
_GPT_OSS_ENDS = ["<|end|>", "<|return|>", "<|call|>"]
_GPT_OSS = {
    "defaults": _DEFAULTS,
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"<\|channel\|>analysis(?! to=)[^<]*<\|message\|>",
            "close": _GPT_OSS_ENDS,
            "content": "text",
            "repeats": True,
        },
        "tool_calls": {
            "open_pattern": r"(?:to=functions\.(?P<name>[\w.-]+)<\|channel\|>\w+"
            r"|<\|channel\|>\w+ to=functions\.(?P<name>[\w.-]+))[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close": _GPT_OSS_ENDS,
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)(?! to=)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close": _GPT_OSS_ENDS,
            "content": "text",
            "repeats": True,
        },
    },
}


def family_template(chat_template: Any) -> dict[str, Any] | None:
    """The description of the family that a chat template belongs to, if it is one of these."""
    if not isinstance(chat_template, str):
        return None
    if "<|channel|>" in chat_template and "<|start|>" in chat_template:
        return _GPT_OSS
    if "<｜Assistant｜>" in chat_template:
        return _DEEPSEEK
    if "[TOOL_CALLS]" in chat_template:
        return _MISTRAL_ONE_BY_ONE if "[ARGS]" in chat_template else _MISTRAL_LIST
    if "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template:
        return _LLAMA
    if "<|im_start|>" in chat_template and "<tool_call>" in chat_template:  # as Hermes and Qwen write them
        return _known_to_transformers("qwen3_5" if "<function=" in chat_template else "qwen3")
    return None


def _known_to_transformers(model_type: str) -> dict[str, Any] | None:
    from transformers.cli.serving.utils import get_response_template

    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    found = get_response_template(SimpleNamespace(), model)
    return None if found is None else dict(found)
