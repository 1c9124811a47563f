"""The server and OpenAI's own client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

import piecegraph
from tests.cases.serving import Served
from tests.cases.tiny_llm import tiny_model

MESSAGES: Any = [{"role": "user", "content": "ax by"}]


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


def called(arguments: str) -> dict[str, Any]:
    """A turn in which a function was called."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


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
    assert "".join(entry.token for entry in content) == expected.text
    assert [(entry.token, entry.logprob) for entry in content] == [(each.token, each.logprob) for each in streamed]
    assert expected.logprobs is not None
    for entry, known in zip(content, expected.logprobs, strict=True):
        assert entry.token == f" {tiny.tokenizer.decode([known.token_id])}"
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
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "is not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "by token ids"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "by token ids"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "logit_bias names token 999"),
        ({"functions": []}, "functions", "functions is not supported"),
        ({"audio": {}}, "audio", "audio is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "PG660 response_format .* decoder"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs", "PG660 structured_outputs"),
        ({"extra_body": {"stop_token_ids": [99]}}, "stop_token_ids", "PG653"),
        ({"stop": [""]}, "stop", "PG108 stop is"),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "guided_json is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs.", "cannot hold"),
        ({"extra_body": {"chat_template_kwargs": {"x": False}}}, "chat_template_kwargs.x", "model does not read x"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, "chat_template_kwargs", "cannot hold self"),
        ({"extra_body": {"chat_template_kwargs": {"conversation": 1}}}, "chat_template_kwargs", "cannot hold"),
        ({"messages": [*MESSAGES, called("[" * 100_000)]}, ARGUMENTS, "is not JSON: too much is in each other"),
        ({"messages": [*MESSAGES, called('{"x": NaN}')]}, ARGUMENTS, "is not JSON: NaN"),
        ({"messages": [*MESSAGES, called("[1]")]}, ARGUMENTS, "is no JSON object"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "'text'"),
        ({"messages": [{"role": "user", "content": "ax " * 70}]}, "messages", "70|72 tokens"),
        ({"temperature": 0, "top_p": 2.0}, "top_p", "top_p is 2.0"),
    ],
)
def test_what_is_refused_by_name(client: openai.OpenAI, arguments: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **arguments})
    assert (raised.value.param or "").startswith(param)
    assert raised.value.type == "invalid_request_error"


def test_a_prompt_alone_says_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    """Whatever the token is that has to be made: here one that would end an answer."""
    given: Any = {"model": "tiny", "prompt": "ax by", "max_tokens": 0, "echo": True, "logit_bias": {"2": 100}}
    whole = client.completions.create(**given).choices[0]
    *_, last = client.completions.create(**given, stream=True)
    assert (whole.finish_reason, whole.text) == ("length", "ax by")
    assert last.choices[0].finish_reason == "length"


def test_null_is_what_is_not_said(running: Served) -> None:
    for path, body, nulls in (
        ("/v1/completions", {"prompt": "ax", "temperature": 0}, ["max_tokens", "echo", "priority", "logprobs"]),
        ("/v1/responses", {"input": "ax", "temperature": 0, "max_output_tokens": 2}, ["text", "reasoning", "tools"]),
        ("/v1/embeddings", {"input": "ax"}, ["encoding_format", "pooling"]),
    ):
        answers = [running.post(path, {"model": "tiny", **body, **said}) for said in ({}, dict.fromkeys(nulls))]
        found = [
            next(answer[name] for name in ("choices", "output", "data") if name in answer) for _, answer, _ in answers
        ]
        assert len(str(found[0])) == len(str(found[1]))  # but for the id of a message
    for name in ("prompt", "bogus"):
        assert running.post("/v1/completions", {"model": "tiny", "prompt": "ax", name: None})[0] == 400


def test_what_completions_refuse(client: openai.OpenAI) -> None:
    for arguments, why in (
        ({"best_of": 2}, "best_of is not supported: answers would be generated to be thrown away"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"max_tokens": 0}, "only with echo"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[]]}, "PG651"),
        ({"prompt": ["ax"] * 1025}, "1025 answers are asked for at once, and no more than 1024 may wait"),
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


def test_responses(client: openai.OpenAI, tiny: piecegraph.LLM) -> None:
    said = [{"role": "system", "content": "cz"}, *MESSAGES]
    (expected,) = tiny.chat(said, max_new_tokens=7)
    arguments: Any = {"model": "tiny", "instructions": "cz", "temperature": 0, "max_output_tokens": 7}
    answer = client.responses.create(**arguments, input="ax by", metadata={"a": "b"})
    assert answer.output_text == expected.text
    assert (answer.status, answer.metadata) == ("incomplete", {"a": "b"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(expected.prompt_token_ids), 7)
    with client.responses.stream(**arguments, input="ax by") as stream:
        events: list[Any] = list(stream)
    assert events[-1].response.output_text == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    # What was answered comes back with the next turn.
    again = client.responses.create(
        **arguments, input=[{"role": "user", "content": "ax by"}, *answer.output, {"role": "user", "content": "dx"}]
    )
    turns = [*said, {"role": "assistant", "content": expected.text}, {"role": "user", "content": "dx"}]
    assert again.output_text == tiny.chat(turns, max_new_tokens=7)[0].text


def test_an_answer_that_the_model_ends(
    client: openai.OpenAI, tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = tiny.chat(MESSAGES, max_new_tokens=7)
    scheduler = tiny.started.engine.scheduler
    monkeypatch.setattr(scheduler, "eos_token_ids", frozenset(expected.token_ids[4:5]))
    num_new = expected.token_ids.index(expected.token_ids[4]) + 1
    with client.responses.stream(model="tiny", input="ax by", temperature=0) as stream:
        response = stream.get_final_response()
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == num_new
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert (
        answer.choices[0].message.content
        == response.output_text
        == tiny.tokenizer.decode([*expected.prompt_token_ids[-1:], *expected.token_ids[: num_new - 1]]).removeprefix(
            tiny.tokenizer.decode(expected.prompt_token_ids[-1:])
        )
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [999]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 64}, "prompt"),
        ("/v1/completions", {"prompt": ["ax", ""]}, "prompt"),
        ("/v1/completions", {"prompt": "ax", "bad_words": ["\ud800"]}, "bad_words"),
        ("/v1/completions", {"prompt": ["ax"] * 1025}, "prompt"),
        ("/v1/completions", {"prompt": "ax", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "ax", "min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ("/v1/responses", {"input": "ax " * 70}, "input"),
        ("/v1/responses", {"input": "ax", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ("/v1/responses", {"input": "ax", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
        ("/v1/embeddings", {"input": "ax " * 70}, "input"),
        ("/v1/embeddings", {"input": [[999]]}, "input"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    ],
)
def test_every_refusal_names_the_field_as_it_was_written(
    running: Served, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = running.post(path, {"model": "tiny", **body})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_what_responses_refuse(client: openai.OpenAI) -> None:
    for arguments, why in (
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools is not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "a name and a schema come with 'json_schema'"),
    ):
        given: Any = {"model": "tiny", "input": "ax", **arguments}
        with pytest.raises(openai.BadRequestError, match=why):
            client.responses.create(**given)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_embeddings_are_those_of_transformers(client: openai.OpenAI, tiny: piecegraph.LLM, pooling: str) -> None:
    texts = ["ax by cz", "dx"]
    model = tiny_model().model
    for encoding in ("float", "base64"):  # the client asks for the second, and reads it, if nothing is said
        answer = client.embeddings.create(
            model="tiny", input=texts, encoding_format=encoding, extra_body={"pooling": pooling}
        )
        assert answer.usage.prompt_tokens == 4
        for text, entry in zip(texts, answer.data, strict=True):
            with torch.no_grad():
                rows = model(torch.tensor([tiny.tokenizer(text)["input_ids"]])).last_hidden_state[0]
            expected = {"mean": rows.mean(0), "last": rows[-1], "cls": rows[0]}[pooling]
            found: Any = entry.embedding
            if isinstance(found, str):
                found = torch.frombuffer(bytearray(base64.b64decode(found)), dtype=torch.float32).tolist()
            assert found == pytest.approx((expected / expected.norm()).tolist(), abs=1e-4)
    assert len(client.embeddings.create(model="tiny", input="ax").data[0].embedding) == 32
    with pytest.raises(openai.BadRequestError, match="dimensions is 7: the model's vectors have 32"):
        client.embeddings.create(model="tiny", input="ax", dimensions=7)
