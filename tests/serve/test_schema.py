"""Answers against the types that the clients publish, read strictly; and every field they know and we do not."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import TypeAdapter

from piecegraph.serve.bodies import ChatBody, CompletionBody
from piecegraph.serve.embeddings import EmbeddingBody
from piecegraph.serve.messages import MessagesBody
from piecegraph.serve.responses import ResponsesBody
from tests.cases.serving import Served

MESSAGES = [{"role": "user", "content": "ax"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 1}
TEXT = {"model": "tiny", "prompt": "ax", "max_tokens": 3, "logprobs": 1}
SHORT = {"model": "tiny", "input": "ax", "max_output_tokens": 3}
MESSAGE = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3}
VECTOR = {"model": "tiny", "input": "ax"}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, openai.types.chat.ChatCompletion),
        ("/v1/completions", TEXT, openai.types.Completion),
        ("/v1/responses", SHORT, openai.types.responses.Response),
        ("/v1/embeddings", VECTOR, openai.types.CreateEmbeddingResponse),
        ("/v1/messages", MESSAGE, anthropic.types.Message),
    ],
)
def test_answers_are_of_the_published_types(running: Served, path: str, body: dict[str, Any], kind: Any) -> None:
    status, answer, _ = running.post(path, body)
    assert status == 200, answer
    kind.model_validate(answer, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, openai.types.chat.ChatCompletionChunk),
        ("/v1/responses", SHORT, openai.types.responses.ResponseStreamEvent),
        ("/v1/messages", MESSAGE, anthropic.types.RawMessageStreamEvent),
    ],
)
def test_events_are_of_the_published_types(running: Served, path: str, body: dict[str, Any], kind: Any) -> None:
    status, text, headers = running.post(path, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    assert len(events) > 3
    for event in events:
        TypeAdapter(kind).validate_json(event)


OTHERS = [
    ("/v1/chat/completions", CHAT, ChatBody, chat_create_params.CompletionCreateParamsBase),
    ("/v1/completions", TEXT, CompletionBody, completion_create_params.CompletionCreateParamsBase),
    ("/v1/responses", SHORT, ResponsesBody, response_create_params.ResponseCreateParamsBase),
    ("/v1/embeddings", VECTOR, EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
    ("/v1/messages", MESSAGE, MessagesBody, message_create_params.MessageCreateParamsBase),
]


@pytest.mark.parametrize(("path", "body", "ours", "theirs"), OTHERS)
def test_every_field_that_clients_know_is_read_or_refused_by_name(
    running: Served, path: str, body: dict[str, Any], ours: Any, theirs: Any
) -> None:
    for name in sorted(set(theirs.__annotations__) - set(ours.model_fields)):
        status, answer, _ = running.post(path, {**body, name: {}})
        assert status == 400
        assert f"{name} is not supported by this server" in answer["error"]["message"]


def test_half_a_character_is_told_of_as_it_came(running: Served) -> None:
    half = "\ud800"
    status, answer, _ = running.post("/v1/completions", {**TEXT, half: 1})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    status, answer, _ = running.post("/v1/responses", {**SHORT, "metadata": {"a": half}})
    assert (status, answer["metadata"]) == (200, {"a": half})
    status, text, _ = running.post("/v1/responses", {**SHORT, "metadata": {"a": half}, "stream": True})
    first = json.loads(text.partition("data: ")[2].partition("\n")[0])
    assert first["response"]["metadata"] == {"a": half}


def test_lists_that_would_slow_down_everybody(running: Served) -> None:
    for name, value in (
        ("stop", ["x"] * 65),
        ("bad_words", ["x"] * 65),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
    ):
        status, answer, _ = running.post("/v1/completions", {**TEXT, name: value})
        assert status == 400
        assert answer["error"]["param"].startswith(name)
