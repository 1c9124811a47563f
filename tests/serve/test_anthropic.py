"""The server and Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

import piecegraph
from tests.cases.serving import Served, served

MESSAGES: Any = [{"role": "user", "content": "ax by"}]


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.address, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def greedy(**arguments: Any) -> dict[str, Any]:
    """The client has no temperature any more; the API has."""
    body = {"temperature": 0, **arguments.pop("extra_body", {})}
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "extra_body": body, **arguments}


def test_a_message(client: anthropic.Anthropic, tiny: piecegraph.LLM) -> None:
    (expected,) = tiny.chat(MESSAGES, max_new_tokens=9)
    answer = client.messages.create(**greedy())
    assert [(block.type, block.text) for block in answer.content] == [("text", expected.text)]  # type: ignore[union-attr]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(expected.prompt_token_ids)
    assert usage.output_tokens == 9


def test_a_message_is_streamed(client: anthropic.Anthropic, tiny: piecegraph.LLM) -> None:
    (expected,) = tiny.chat(MESSAGES, max_new_tokens=9)
    with client.messages.stream(**greedy()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == expected.text
    assert final.content[0].text == expected.text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 9)
    kinds = [event.type for event in client.messages.create(**greedy(), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_system_prompt_blocks_and_stops(client: anthropic.Anthropic, tiny: piecegraph.LLM) -> None:
    said = [{"role": "system", "content": "cz"}, *MESSAGES]
    (expected,) = tiny.chat(said, max_new_tokens=9)
    stop = str(expected.text).split()[2]
    system: Any = [{"type": "text", "text": "cz", "cache_control": {"type": "ephemeral"}}]
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "ax "}, {"type": "text", "text": "by"}]}]
    answer = client.messages.create(**greedy(system=system, messages=blocks, stop_sequences=[stop]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == str(expected.text).partition(stop)[0]  # type: ignore[union-attr]
    assert client.messages.count_tokens(model="tiny", messages=MESSAGES, system="cz").input_tokens == len(
        tiny.chat_prompt(said)
    )


def test_errors_are_in_its_own_shape(client: anthropic.Anthropic, tiny: piecegraph.LLM) -> None:
    for arguments, why in (
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools is not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"extra_body": {"temperature": 1.5}}, "temperature: input should be less than or equal to 1"),
        ({"extra_body": {"top_p": 2.0}}, "PG108 top_p"),
        ({"stop_sequences": [""]}, "PG108 stop_sequences is"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "ax " * 70}]}, "messages: PG652"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, r"\[0\].content\[0\].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]\.content\[0\]"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "ax"}]}, "the last turn is the assistant's"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=why) as raised:
            client.messages.create(**greedy(**arguments))
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**greedy(model="other"))
    with served(tiny, api_keys=("key",)) as running:
        for key, is_right in (("key", True), ("kex", False)):
            with anthropic.Anthropic(base_url=running.address, api_key=key, max_retries=0) as other:
                if is_right:
                    other.messages.create(**greedy())
                else:
                    with pytest.raises(anthropic.AuthenticationError):
                        other.messages.create(**greedy())
