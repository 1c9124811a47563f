"""The server and OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

import piecegraph
from tests.cases.serving import Served

MESSAGES: Any = [{"role": "user", "content": "ax by"}]


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "piecegraph"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.code == "model_not_found"


def test_chat(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    (expected,) = tiny.chat(MESSAGES, max_new_tokens=9)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=9)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected.prompt_token_ids), 9)


def test_a_chat_without_a_limit_goes_on_to_the_model_s(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 64


def test_a_chat_is_streamed(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    (expected,) = tiny.chat(MESSAGES, max_new_tokens=9)
    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage
    assert text == expected.text
    assert [reason for reason in reasons if reason] == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 9


def test_parts_and_roles(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    said: Any = [
        {"role": "system", "content": "ax"},
        {"role": "user", "content": [{"type": "text", "text": "by"}, {"type": "text", "text": " cz"}]},
        {"role": "assistant", "content": "dx"},
    ]
    plain = [{"role": each["role"], "content": text} for each, text in zip(said, ("ax", "by cz", "dx"), strict=True)]
    answer = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=5)
    assert answer.choices[0].message.content == tiny.chat(plain, max_new_tokens=5)[0].text


def test_several_answers_with_a_seed(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    prompt = tiny.chat_prompt(MESSAGES)
    expected = [answer.text for answer in tiny.generate([prompt], n=3, temperature=1.3, seed=5, max_new_tokens=8)]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, temperature=1.3, seed=5, max_tokens=8)
    assert [choice.message.content for choice in answer.choices] == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, temperature=1.3, seed=5, max_tokens=8, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_log_probabilities_of_a_chat(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    (expected,) = tiny.chat(MESSAGES, max_new_tokens=4, logprobs=2)
    arguments: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
    arguments |= {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**arguments)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**arguments, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.logprob) for entry in content] == [(each.token, each.logprob) for each in streamed]
    assert expected.logprobs is not None
    for entry, known in zip(content, expected.logprobs, strict=True):
        assert entry.token == tiny.tokenizer.decode([known.token_id])
        assert entry.logprob == pytest.approx(known.logprob, abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([p for _, p in known.top], abs=1e-4)
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completions(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    prompts: list[Any] = ["ax by", "cz"]
    expected = [answer.text for answer in tiny.generate(prompts, max_new_tokens=6)]
    for prompt in (prompts, [tiny.tokenizer(each)["input_ids"] for each in prompts]):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=6)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=6, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    answer = client.completions.create(model="tiny", prompt=tiny.tokenizer("ax by")["input_ids"], temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_log_probabilities_of_a_prompt(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    (expected,) = tiny.generate(["ax by cz"], max_new_tokens=2, logprobs=1, prompt_logprobs=1)
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    for num_new in (2, 0):
        answer = client.completions.create(
            model="tiny", prompt="ax by cz", temperature=0, max_tokens=num_new, logprobs=1, echo=True
        )
        choice = answer.choices[0]
        assert choice.text == "ax by cz" + str(expected.text if num_new else "")
        assert choice.logprobs is not None
        found = choice.logprobs.token_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == 3 + num_new
        assert found[1:] == pytest.approx([each.logprob for each in entries[1 : 3 + num_new] if each], abs=1e-4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == num_new


def test_what_vllm_has_beside_it(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    gx = tiny.tokenizer.convert_tokens_to_ids("gx")
    arguments: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "min_tokens": 2,
        "bad_words": ["ax"],
        "stop_token_ids": [gx],
    }
    (expected,) = tiny.generate(["ax by"], max_new_tokens=12, logit_bias={7: 2.0}, presence_penalty=0.5, **arguments)
    answer = client.completions.create(
        model="tiny",
        prompt="ax by",
        temperature=0,
        max_tokens=12,
        logit_bias={"7": 2},
        presence_penalty=0.5,
        extra_body=arguments,
    )
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.choices[0].stop_reason == expected.stop_reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "param", "why"),
    [
        ({"top_p": 2.0}, "top_p", "top_p is 2.0: it must be a number above 0 and at most 1"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"n": 0}, "n", "n: input should be greater than or equal to 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "are one"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for streams"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "by token ids"),
        ({"logit_bias": {"999": 1}}, None, "logit_bias names token 999"),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ({"audio": {}}, "audio", "audio is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "input should be 'text'"),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "guided_json is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template", "no template of its own"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, None, "the chat template does not read"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0", "'text'"),
        ({"messages": [{"role": "user", "content": "ax " * 70}]}, None, "70|72 tokens"),
        ({"temperature": 0, "top_p": 2.0}, "top_p", "top_p is 2.0"),
    ],
)
def test_what_is_refused_by_name(client: openai.OpenAI, arguments: dict[str, Any], param: str | None, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **arguments})
    assert (raised.value.param or "").startswith(param or "")
    assert raised.value.type == "invalid_request_error"


def test_what_completions_refuse(client: openai.OpenAI) -> None:
    for arguments, why in (
        ({"best_of": 2}, "best_of is not supported: answers would be generated to be thrown away"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"max_tokens": 0}, "only with echo"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[]]}, "PG651"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo is not supported"),
    ):
        given: Any = {"model": "tiny", "prompt": "ax", **arguments}
        with pytest.raises(openai.BadRequestError, match=why):
            client.completions.create(**given)
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.completions.create(model="gpt", prompt="ax")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt=[5] * 64)
    assert raised.value.code == "context_length_exceeded"
