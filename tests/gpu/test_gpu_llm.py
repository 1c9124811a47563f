"""Language models through real graphs: captured and uncaptured steps give the same tokens.

In float32 where tokens are compared: sequences that meet other neighbours, and sums that are split otherwise, round
differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.llm import parts
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import SHORT_CONTEXT
from tests.cases.checkpoints import make_byte_tokenizer
from tests.cases.llms import tiny_model

pytestmark = pytest.mark.gpu

SIZES = [1, 2, 4, 8, 16, 32]
PROMPTS = [list(range(3, 3 + length)) for length in (5, 21, 9, 40, 1)]


@contextmanager
def running(folder: Path, **arguments: Any) -> Iterator[Any]:
    limits = {"max_model_len": 128, "max_num_seqs": 4, "max_batch_tokens": 32}
    yield piecegraph.LLM(str(folder), device="cuda", capture_sizes=SIZES, **limits | {"backend": "eager"} | arguments)


def tokens(llm: Any, **arguments: Any) -> list[list[int]]:
    how = {"max_new_tokens": 24, "ignore_eos": True, **arguments}
    return [out.token_ids for out in llm.generate(PROMPTS, **how)]


@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", "full"), ("gemma3", "full"), ("lfm2", "full"), ("bamba", "piecewise")],
)
def test_captured_steps_give_the_same_tokens(family: str, mode: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    with running(tmp_path, cudagraph_mode="none", options={"look_ahead": False}) as plain:
        expected, drawn = tokens(plain), tokens(plain, temperature=0.8, top_k=20, seed=1)
    with running(tmp_path) as llm:
        assert {each.choice for each in llm.started.engine.forward.modes.values()} == {mode}
        for _ in range(3):
            assert tokens(llm) == expected
        assert tokens(llm, temperature=0.8, top_k=20, seed=1) == drawn
        assert llm.stats()["coverage"] == 1.0
        assert not llm.stats()["fallbacks"]


def test_contexts_that_grow_long_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one step to the next a few sequences have another size, in which attention has more programs."""
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(parts, "short_seqs", lambda rows: 8)
    lengths = (SHORT_CONTEXT - 9, 30, SHORT_CONTEXT - 20, 5, 9, 70)
    prompts = [[3 + number % 120 for number in range(length)] for length in lengths]
    limits = {"max_model_len": 512, "max_batch_tokens": 512, "max_num_seqs": 8}
    found = []
    for mode in ("none", "auto"):
        llm = piecegraph.LLM(str(tmp_path), device="cuda", backend="eager", cudagraph_mode=mode, **limits)
        found.append([out.token_ids for out in llm.generate(prompts, max_new_tokens=40, ignore_eos=True)])
        tapes = {key.bucket for key in llm.started.engine.forward.library.tapes}
        llm.close()
    assert {Bucket(8, 8, "decode"), Bucket(8, 8, "decode", is_short=True)} <= tapes
    assert found[0] == found[1]


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {7: 3.0, 9: -100}},
    {"min_tokens": 20, "stop_token_ids": list(range(64)), "bad_words": [[5], [8, 9]], "ignore_eos": False},
    {"temperature": 0.9, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2},
]


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda", dtype=torch.bfloat16),
    "default device": lambda: torch.device("cuda"),
    "a stream": lambda: torch.cuda.stream(torch.cuda.Stream()),
}


@pytest.mark.parametrize("mode", MODES)
def test_what_the_caller_has_chosen_changes_no_answer(mode: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}, {"logprobs": 2}, *ADJUSTED]
    with running(tmp_path) as plain, MODES[mode](), running(tmp_path) as llm:
        found = [tokens(llm, **way) for way in ways]
        also = [tokens(plain, **way) for way in ways]
        assert llm.stats()["coverage"] == plain.stats()["coverage"] == 1.0
    expected = [tokens(plain, **way) for way in ways]
    assert found == expected
    assert also == expected


def assert_same_but_for_ties(found: list[list[int]], expected: list[Any]) -> None:
    """The same tokens until the first where two were as likely as each other, within what bfloat16 rounds."""
    for mine, theirs in zip(found, expected, strict=True):
        differs = (number for number, token in enumerate(theirs.token_ids) if mine[number] != token)
        first = next(differs, None)
        if first is not None:
            near = {
                token
                for token, logprob in theirs.logprobs[first].top
                if logprob > theirs.logprobs[first].logprob - 0.05
            }
            assert mine[first] in near, (first, mine, theirs.token_ids)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_what_is_captured_in_bfloat16_alone_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    tiny_model(family, asks_all=True).to(torch.bfloat16).save_pretrained(tmp_path)
    with running(tmp_path, cudagraph_mode="none", options={"look_ahead": False}) as plain:
        expected = plain.generate(PROMPTS, max_new_tokens=24, ignore_eos=True, logprobs=4)
    with running(tmp_path) as llm:
        assert {each.choice for each in llm.started.engine.forward.modes.values()} == {"full"}
        for _ in range(3):
            assert_same_but_for_ties(tokens(llm), expected)
        assert llm.stats()["coverage"] == 1.0
        assert not llm.stats()["fallbacks"]


def test_logits_are_adjusted_in_captured_steps(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    arguments = [{"max_new_tokens": 24, "ignore_eos": True, **wish} for wish in ADJUSTED]
    with running(tmp_path, cudagraph_mode="none", options={"look_ahead": False}) as plain:
        expected = [[out.token_ids for out in plain.generate(PROMPTS, **each)] for each in arguments]
        unadjusted = tokens(plain)
    with running(tmp_path) as llm:
        for each, known in zip(arguments * 2, expected * 2, strict=True):
            assert [out.token_ids for out in llm.generate(PROMPTS, **each)] == known
            assert tokens(llm) == unadjusted
        assert llm.stats()["coverage"] == 1.0
        assert not llm.stats()["fallbacks"]


def test_answers_have_their_form_in_captured_steps(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    form: dict[str, Any] = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{8}"}, "temperature": 1.0, "seed": 4}
    with running(tmp_path, cudagraph_mode="none", options={"look_ahead": False}) as plain:
        expected = [out.text for out in plain.generate(PROMPTS, **form)]
        free = tokens(plain)
    assert all(re.fullmatch("[a-f]{3}-[0-9]{8}", str(text)) for text in expected)
    with running(tmp_path) as llm:
        for _ in range(2):
            assert [out.text for out in llm.generate(PROMPTS, **form)] == expected
            assert tokens(llm) == free
        assert llm.stats()["coverage"] == 1.0
        assert not llm.stats()["fallbacks"]


def test_requests_of_asyncio(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)

    async def ask(llm: Any) -> list[list[int]]:
        async with piecegraph.AsyncLLM(llm, records_idle=True) as service:
            dropped = service.generate(PROMPTS[0], max_new_tokens=64, ignore_eos=True)
            await anext(dropped)
            del dropped
            asked = (service.generate(each, max_new_tokens=24, ignore_eos=True)._all() for each in PROMPTS)
            return [answer.token_ids for (answer,) in await asyncio.gather(*asked)]

    with running(tmp_path) as llm:
        assert asyncio.run(ask(llm)) == tokens(llm)
        assert llm.started.engine.scheduler.num_unfinished == 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_steps_with_every_row_and_without_give_the_same(backend: str, tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    prompt = PROMPTS[3][:32]
    with running(tmp_path, backend=backend, options={"provenance": True}) as llm:
        assert "last piece: on rows with logits" in llm.explain()
        (few,) = llm.generate([prompt], max_new_tokens=4, ignore_eos=True)
        (every,) = llm.generate([prompt], max_new_tokens=4, ignore_eos=True, return_hidden_states=True)
        assert few.token_ids == every.token_ids
        assert every.hidden_states is not None
        assert len(every.hidden_states) == len(prompt) + 3
        assert llm.stats()["coverage"] == 1.0
        phases = {live.tape.phase for live in llm.kernels.select(module="layers.*.mlp").kernels}
        assert {"mixed 32 tokens of 4 sequences", "mixed 32 tokens of 4 sequences, every row"} <= phases


def test_float32_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with running(tmp_path, dtype=torch.float32, backend="inductor") as llm:
        found = tokens(llm)
    for prompt, mine in zip(PROMPTS, found, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert mine == theirs[0, len(prompt) :].tolist()


def test_a_thousand_steps_leak_nothing(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    with running(tmp_path) as llm:
        tokens(llm)
        before = torch.cuda.memory_allocated()
        for _ in range(8):
            llm.generate(PROMPTS[:4], max_new_tokens=80, ignore_eos=True)
        assert torch.cuda.memory_allocated() <= before
