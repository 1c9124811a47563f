"""Where tokens begin in a text, also those that are parts of a character, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import transformers as hf
from tokenizers import decoders, models, pre_tokenizers

import piecegraph
from piecegraph.serve.logprobs import TokenTexts
from tests.cases.byte_llm import byte_tokenizer, write_byte_llm
from tests.cases.serving import Served, served
from tests.cases.tiny_llm import tiny_tokenizer

SAID = "añ日 b😀"
PROMPT = "é日本x"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module", params=[False, True], ids=["byte-level", "byte-fallback"])
def bytewise(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_byte_llm(tmp_path_factory.mktemp("bytes"), chat_template=TEMPLATE, falls_back=request.param)
    with piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=4, options={"progress": False}) as llm:
        with served(llm) as found:
            yield found


def begins(text: str, before: int = 0) -> list[int]:
    """Of each byte of a text, the place of its character."""
    return [before + place for place, character in enumerate(text) for _ in character.encode()]


def asked(**more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "logprobs": 1, "n": 2}
    return {**body, "structured_outputs": {"choice": [SAID]}, **more}


def test_offsets_are_those_of_characters_in_the_text(bytewise: Served) -> None:
    ids = bytewise.llm.tokenizer(PROMPT)["input_ids"]
    for more, before in (({}, None), ({"echo": True}, PROMPT), ({"echo": True, "prompt": ids}, PROMPT)):
        status, answer, _ = bytewise.post("/v1/completions", asked(**more))
        assert status == 200, answer
        for choice in answer["choices"]:
            expected = begins(before or "") + begins(SAID, len(before or ""))
            assert choice["text"] == (before or "") + SAID
            assert choice["logprobs"]["text_offset"][: len(expected)] == expected
            assert set(choice["logprobs"]["text_offset"][len(expected) :]) <= {len(choice["text"])}  # what ended it


def test_texts_are_the_same_in_a_stream(bytewise: Served) -> None:
    form = {"choice": ["😀😀é€日"]}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "é"}], "max_tokens": 40, "n": 2}
    for path, body in (("/v1/completions", asked()), ("/v1/chat/completions", chat)):
        for stop, expected in ([], "😀😀é€日"), (["€x", "é€"], "😀😀"), (["日"], "😀😀é€"):
            _, answer, _ = bytewise.post(path, {**body, "structured_outputs": form, "stop": stop})
            _, events, _ = bytewise.post(path, {**body, "structured_outputs": form, "stop": stop, "stream": True})
            found = ["", ""]
            for line in events.splitlines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    found[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
            assert found == texts == [expected] * 2


def test_ends_of_lines_within_texts_end_no_line_of_an_event(bytewise: Served) -> None:
    said = "a\u2028\u2029\x85\x0b\x1cb"
    body = {"model": "tiny", "max_tokens": 40, "structured_outputs": {"choice": [said]}, "stream": True}
    chat = {**body, "messages": [{"role": "user", "content": "é"}]}
    for path, asks in (("/v1/completions", {**body, "prompt": PROMPT}), ("/v1/chat/completions", chat)):
        for more in ({}, {"logprobs": 1 if path == "/v1/completions" else True}):
            events = bytewise.post(path, {**asks, **more})[1]
            assert events.splitlines() == events.split("\n")[:-1], "clients cut them in either way"
            parts = [json.loads(line[6:])["choices"][0] for line in events.splitlines() if line.startswith("data: {")]
            assert "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts) == said


def test_tokens_that_are_no_text_are_told_apart_from_others(bytewise: Served) -> None:
    tokens = bytewise.llm.tokenizer("é😀日")["input_ids"][:-1]
    assert bytewise.post("/detokenize", {"tokens": tokens})[1]["prompt"].rstrip("\ufffd") == "é😀"


def test_offsets_are_the_same_in_a_stream(bytewise: Served) -> None:
    for more in ({}, {"stop": ["日 b"]}, {"structured_outputs": {"regex": "[ab]{30}"}}):
        _, answer, _ = bytewise.post("/v1/completions", asked(seed=1, **more))
        _, text, _ = bytewise.post("/v1/completions", asked(seed=1, **more, stream=True))
        found: dict[int, list[int]] = {0: [], 1: []}
        for line in text.splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                found[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
        assert [found[0], found[1]] == [each["logprobs"]["text_offset"] for each in answer["choices"]]
        assert found[0] == sorted(found[0])


@pytest.mark.parametrize(("new", "answered"), [("日", "x日日"), ("a", "x日\ufffda")])
def test_a_character_that_the_prompt_begins_is_told_once(bytewise: Served, new: str, answered: str) -> None:
    """By the answer if that completes it, and by the prompt otherwise."""
    tokenize = bytewise.llm.tokenizer
    *prompt, _ = tokenize("x日日")["input_ids"]
    bias = {str(tokenize(new)["input_ids"][-1]): 100}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logit_bias": bias}
    for echo, expected in ((False, new), (True, answered)):
        _, answer, _ = bytewise.post("/v1/completions", {**body, "echo": echo, "logprobs": 0})
        _, events, _ = bytewise.post("/v1/completions", {**body, "echo": echo, "stream": True})
        streamed = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        (choice,) = answer["choices"]
        assert choice["text"] == "".join(each["choices"][0]["text"] for each in streamed)
        assert choice["text"].replace("\ufffd" * 2, "\ufffd") == expected  # of two bytes, one or two are made
        assert choice["logprobs"]["text_offset"][-1] == len(choice["text"]) - 1


def test_texts_of_tokens_are_those_they_have_behind_others() -> None:
    words = tiny_tokenizer(chat=False)
    first, second = words("ax by")["input_ids"]
    texts = TokenTexts(words)
    assert (texts(first), texts(second, first), texts(first, first)) == ("ax", " by", " ax")
    texts = TokenTexts(byte_tokenizer(falls_back=True))
    assert [texts(4 + byte, 4 + 0xE2) for byte in b" a\n\xe2"] == [" ", "a", "\n", "\ufffd"]


@pytest.fixture(scope="module")
def spaced_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of which the end of a word is in a token (``b</w>``), as BPE was first written, and CLIP has it."""
    folder = write_byte_llm(tmp_path_factory.mktemp("suffix"), chat_template=TEMPLATE)
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"{name}{end}" for name in "abcdefgh" for end in ("", "</w>"))]
    names += [f"{number}</w>" for number in range(260 - len(names))]
    model = models.BPE({name: number for number, name in enumerate(names)}, [], end_of_word_suffix="</w>")
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    with piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=4, options={"progress": False}) as llm:
        with served(llm) as found:
            yield found


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"skip_special_tokens": False}, {"prompt": [1, 1]}])
def test_texts_of_tokens_make_up_the_text(spaced_behind: Served, more: dict[str, Any]) -> None:
    """Also where a space belongs to the token that it is behind."""
    body = {"model": "tiny", "prompt": "ab cd e", "max_tokens": 20, "seed": 3, "temperature": 1.5}
    _, answer, _ = spaced_behind.post("/v1/completions", {**body, "logprobs": 2, **more})
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    places = zip(told["text_offset"], told["tokens"], strict=True)
    assert all(choice["text"][offset:].startswith(text) for offset, text in places)
    if more == {"echo": True}:
        return
    _, events, _ = spaced_behind.post("/v1/completions", {**body, "logprobs": 2, **more, "stream": True})
    parts = [json.loads(line[6:])["choices"][0]["logprobs"] for line in events.splitlines() if line[6:7] == "{"]
    for name in ("tokens", "text_offset", "top_logprobs"):
        assert [each for part in parts if part for each in part[name]] == told[name]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": body.pop("prompt")}], "logprobs": True, **body}
    _, answer, _ = spaced_behind.post("/v1/chat/completions", chat)
    (choice,) = answer["choices"]
    assert "".join(each["token"] for each in choice["logprobs"]["content"]) == choice["message"]["content"]
    _, events, _ = spaced_behind.post("/v1/chat/completions", {**chat, "stream": True})
    parts = [json.loads(line[6:])["choices"][0] for line in events.splitlines() if line[6:7] == "{"]
    told = [each["token"] for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
    assert told == [each["token"] for each in choice["logprobs"]["content"]]


def test_offsets_of_prompts_that_are_written_otherwise() -> None:
    words = tiny_tokenizer(chat=False)
    prompt = "ax  nobody by"
    assert TokenTexts(words).offsets_in_prompt(prompt, words(prompt)["input_ids"]) == [0, 2, 10]
    slow = byte_tokenizer()
    tokens = slow(PROMPT)["input_ids"]
    expected = begins(PROMPT)
    assert TokenTexts(slow).offsets_in_prompt(PROMPT, tokens) == expected
    broken = [
        *tokens[:1],
        *tokens[-1:],
        *tokens[2:4],
        *tokens[-1:],
    ]  # of two characters the beginnings, each with an x behind it
    assert TokenTexts(slow).offsets_in_prompt(broken, broken)[1::3] == [1, 3]
    slow.__class__ = type("Slow", (type(slow),), {"is_fast": False})
    assert TokenTexts(slow).offsets_in_prompt(PROMPT, tokens) == expected
