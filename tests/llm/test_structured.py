"""Answers of a given form: always of it, and what the model would say anyway where the form allows that."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
import torch

import piecegraph
from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm import Request, SamplingParams, StructuredOutputsParams
from piecegraph.llm.kernels.race import keep_allowed
from piecegraph.llm.run.masks import MaskBuffers
from piecegraph.llm.run.structured import Guide, Guides, take_tokens
from tests.cases.checkpoints import make_byte_tokenizer, make_tokenizer
from tests.cases.llm_shelf import Shelf

PROMPTS = ["The answer: ", "x", 'a {"b": 12} ', "true or false? "]
NUM_NEW = 90
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "ab"]}, "maxItems": 2},
    },
    "required": ["name", "ok", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: word (" " word){1,3}\nword: /[a-c]{2}/ | "true"'
CHOICES = ["yes", "no", 'may"be\\', "não"]


def is_of_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA}, is_of_schema),
    "json text": ({"json": json.dumps(SCHEMA)}, is_of_schema),
    "regex": ({"regex": r"[a-f]{3}-[0-9]{1,4}"}, lambda text: re.fullmatch(r"[a-f]{3}-[0-9]{1,4}", text)),
    "choice": ({"choice": CHOICES[:3]}, lambda text: text in CHOICES),
    "grammar": ({"grammar": LARK}, lambda text: re.fullmatch(r"([a-c]{2}|true)( ([a-c]{2}|true)){1,3}", text)),
}


@pytest.fixture(scope="module")
def path(models: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-level") / "llama"
    shutil.copytree(models.path("llama"), folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def load(path: Path, **arguments: Any) -> piecegraph.LLM:
    options = {"progress": False, **arguments.pop("options", {})}
    return piecegraph.LLM(
        path, **{"backend": "eager", "device": "cpu", "max_num_seqs": 8, **arguments}, options=options
    )


@pytest.fixture(scope="module")
def llm(path: Path) -> piecegraph.LLM:
    return load(path, capture_sizes=[1, 8, 64], options={"graph_device": "simulated", "look_ahead": True})


@pytest.mark.parametrize("name", FORMS)
def test_answers_are_of_the_form(llm: piecegraph.LLM, name: str) -> None:
    form, is_right = FORMS[name]
    params = [
        SamplingParams(max_new_tokens=NUM_NEW, structured_outputs=form, temperature=temperature, seed=seed)
        for seed, temperature in enumerate((0.0, 1.0, 3.0, 1.5))
    ]
    answers = llm.generate(PROMPTS, params) + llm.generate(PROMPTS[::-1], params)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert all(is_right(str(answer.text)) for answer in answers)
    assert len({answer.text for answer in answers}) > 1


def test_a_form_that_does_not_bind_changes_nothing(llm: piecegraph.LLM) -> None:
    how: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    banned = [token for token in range(128) if token < 4 or token >= 115]  # what has no text
    how["bad_words"] = [[token] for token in banned]
    for sampling in ({}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.3, "top_k": 20, "seed": 6}):
        plain = llm.generate(PROMPTS, **how, **sampling)
        free = llm.generate(PROMPTS, **how, **sampling, structured_outputs={"regex": r"(.|\n)*"})
        assert [answer.token_ids for answer in free] == [answer.token_ids for answer in plain]


def test_others_of_the_batch_are_left_alone(llm: piecegraph.LLM) -> None:
    alone = llm.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    form = SamplingParams(max_new_tokens=NUM_NEW, structured_outputs=FORMS["json"][0], temperature=1.0, seed=3)
    plain = SamplingParams(max_new_tokens=24, ignore_eos=True)
    (first,) = llm.generate(PROMPTS[:1], form)
    for _ in range(2):  # masks of rows that are gone leave nothing behind
        mixed = llm.generate([PROMPTS[0], *PROMPTS, PROMPTS[0]], [form, *[plain] * 4, form])
        assert [answer.token_ids for answer in mixed[1:-1]] == [answer.token_ids for answer in alone]
        assert mixed[0].token_ids == mixed[-1].token_ids == first.token_ids


def test_steps_with_masks_are_recorded_and_launched_ahead(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path, capture_sizes=[1, 4, 64], options={"graph_device": "simulated", "look_ahead": True})
    engine, ahead = llm.started.engine, list[bool]()
    launch = engine._launch_ahead

    def counted(current: Any) -> Any:
        found = launch(current)
        ahead.append(found is not None and current.is_committed)  # before the masks of what follows were computed
        return found

    monkeypatch.setattr(engine, "_launch_ahead", counted)
    answers = llm.generate(PROMPTS, max_new_tokens=NUM_NEW, structured_outputs={"regex": "[0-9]{12}"})
    assert {answer.metrics.graph_coverage for answer in answers} == {1}
    assert sum(ahead) > 5
    engine.scheduler.check()
    masked = [tape for key, tape in engine.forward.library.tapes.items() if key.has_masks]
    ends = {tuple(str(step.label) for step in tape.steps[-3:]) for tape in masked}
    assert {end[1:] for end in ends} == {("cut 0 (masks)", "sampler")}
    assert ("head and sampler", "cut 0 (masks)", "sampler") in ends, "behind a greedy step"


def test_deterministic(path: Path) -> None:
    llm = load(path, deterministic=True, max_num_seqs=2, options={"graph_device": "simulated", "look_ahead": True})
    form = SamplingParams(structured_outputs={"regex": "[0-9]{6}"}, temperature=1.0, seed=1)
    (alone,) = llm.generate(["x"], form)
    beside, _ = llm.generate(["x", "y"], [form, SamplingParams()])
    assert alone.token_ids == beside.token_ids
    assert re.fullmatch("[0-9]{6}", str(alone.text))


def test_a_preempted_answer_goes_on_in_its_form(path: Path) -> None:
    options = {"block_size": 4, "cache_tokens": 60, "look_ahead": True}
    llm = load(path, max_model_len=56, max_num_seqs=4, options=options)
    answers = llm.generate(PROMPTS, max_new_tokens=36, structured_outputs={"regex": "[0-9]{30}"})
    assert sum(answer.metrics.num_preemptions for answer in answers) > 0
    assert all(re.fullmatch("[0-9]{30}", str(answer.text)) for answer in answers)


def test_with_other_wishes(llm: piecegraph.LLM) -> None:
    form = {"regex": "[ab]{1,30}"}
    a, b = llm.tokenizer("a").input_ids[0], llm.tokenizer("b").input_ids[0]
    both = llm.tokenizer("ab").input_ids[0]
    (answer,) = llm.generate(["x"], structured_outputs=form, bad_words=[[b], [both]], min_tokens=6, max_new_tokens=40)
    assert set(answer.token_ids[:6]) == {a}
    (answer,) = llm.generate(["x"], structured_outputs=form, presence_penalty=2.0, logprobs=2, max_new_tokens=8)
    assert len(answer.logprobs or ()) == len(answer.token_ids)
    (answer,) = llm.generate(["x"], structured_outputs={"regex": "ab[0-9]+"}, stop="b", max_new_tokens=8)
    assert (answer.text, answer.stop_reason) == ("a", "b")
    answers = llm.generate(["x"], n=3, structured_outputs={"choice": ["12", "ab"]}, temperature=2.0, seed=1)
    assert {answer.text for answer in answers} <= {"12", "ab"}
    (answer,) = llm.generate(["x"], structured_outputs={"regex": "[0-9]{40}"}, max_new_tokens=3)
    assert answer.finish_reason == "length"


def test_a_class_of_pydantic_and_any_object(llm: piecegraph.LLM) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Point", x=(bool, ...))
    (answer,) = llm.generate(["x"], structured_outputs={"json": model}, max_new_tokens=60, temperature=0.5, seed=2)
    if answer.finish_reason == "stop":  # it may write spaces without end
        assert set(json.loads(str(answer.text))) == {"x"}
    assert StructuredOutputsParams(json_object=True).grammar_text != StructuredOutputsParams(json=True).grammar_text


def test_in_asyncio(path: Path) -> None:
    async def ask() -> list[str]:
        async with piecegraph.AsyncLLM(load(path, options={"look_ahead": True})) as llm:
            form = {"choice": ["yes", "no"]}
            calls = [llm.generate(prompt, structured_outputs=form) for prompt in [*PROMPTS, [5, 6]]]
            with pytest.raises(RequestError, match="PG660"):
                await llm.generate("x", structured_outputs={"regex": "["})
            return [str(answer.text) for call in calls for answer in await call]

    assert set(asyncio.run(ask())) <= {"yes", "no"}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"regex": "[0-9"}, "unclosed character class"),
        ({"json": {"type": "objet"}}, "Invalid type: objet"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"grammar": "start: missing"}, "missing"),
        ({"json": False}, "nsatisfiable"),
        ({"json": {"$ref": "#"}}, "nothing is of this form"),
        ({"grammar": "start: start"}, "nothing is of this form"),
        ({"regex": "[^\\x00-\\U0010ffff]"}, "nothing is of this form"),
    ],
)
def test_forms_that_cannot_be(llm: piecegraph.LLM, form: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=f"PG660.*{why}"):
        llm.generate(["x"], structured_outputs=form)
    good, bad = llm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured_outputs=form)], on_error="return")
    assert (good.error, bad.finish_reason) == (None, "error")
    assert llm.started.engine.is_idle


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, "one of json, regex, choice, grammar, json_object"),
        ({"json": {}, "regex": "a"}, "not \\['json', 'regex'\\]"),
        ({"schema": {}}, "a dictionary with one of"),
        ("[0-9]", "it must be StructuredOutputsParams"),
        ({"choice": []}, "none of them empty"),
        ({"choice": "yes"}, "none of them empty"),
        ({"regex": 7}, "it is a text"),
        ({"json": "{"}, "no JSON schema"),
        ({"json": [1]}, "no JSON schema"),
        ({"regex": "\ud800"}, "half a character"),
        ({"choice": ["yes", "\udfff"]}, "half a character"),
    ],
)
def test_forms_that_are_not_told_clearly(form: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"PG108 structured_outputs.*{why}"):
        SamplingParams(structured_outputs=form)


def test_names_of_others(llm: piecegraph.LLM) -> None:
    with pytest.raises(ConfigError, match="here it is structured_outputs=.'json': ..."):
        llm.generate(["x"], guided_json={})  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="PG108 structured_outputs was given.*use generate"):
        Request("by hand", [5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))


def test_a_tokenizer_that_is_not_of_bytes() -> None:
    with pytest.raises(RequestError, match="PG660.*decoder"):
        Guides(make_tokenizer(), 128, [2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("why", ["structured_outputs and bad_words", "structured_outputs and min_tokens", "min_tokens"])
def test_no_token_may_follow(llm: piecegraph.LLM, why: str, temperature: float) -> None:
    """Nothing is wrong with the model, and others go on."""
    last = llm.tokenizer("z").input_ids
    limits: dict[str, Any] = {
        "structured_outputs and bad_words": {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]},
        "structured_outputs and min_tokens": {
            "structured_outputs": {"regex": "z{3}"},
            "stop_token_ids": last,
            "min_tokens": 3,
        },
        "min_tokens": {"stop_token_ids": list(range(llm.started.limits.vocab_size)), "min_tokens": 2},
    }[why]
    bad, good = llm.generate(
        ["x", "y"],
        [SamplingParams(temperature=temperature, max_new_tokens=9, **limits), SamplingParams(max_new_tokens=9)],
        on_error="return",
    )
    assert str(bad.error).startswith(f"PG660 no token may follow in the answer at prompts[0]: {why} forbid all")
    assert good.error is None


def test_an_answer_that_ends_before_it_is_of_its_form_is_an_error() -> None:
    tokenizer = make_byte_tokenizer()
    guide = Guides(tokenizer, 384, [2]).make(StructuredOutputsParams(grammar='start: "a" rest\nrest: rest'))
    take_tokens([(guide, tokenizer("a").input_ids[0])])
    assert guide.error is None
    take_tokens([(guide, 2)])
    assert str(guide.error).startswith("PG660 the structured output cannot be gone on with")


def test_a_form_that_cannot_be_gone_on_with_ends_its_request_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path, options={"look_ahead": True})

    def take_tokens(taken: list[tuple[Guide, int]]) -> None:
        for guide, token in taken:
            guide.error = RequestError("PG660", "too complicated") if token == 20 else None

    monkeypatch.setattr("piecegraph.llm.run.endings.take_tokens", take_tokens)
    form = SamplingParams(structured_outputs={"regex": "0[0-9]{30}"})
    bad, good = llm.generate(["x", "y"], [form, SamplingParams(max_new_tokens=9)], on_error="return")
    assert "PG660" in str(bad.error)
    assert len(good.token_ids) == 9
    assert llm.started.engine.is_idle


@pytest.mark.parametrize("count", [1, 40])
def test_a_token_that_cannot_come_is_an_error_of_its_answer_alone(count: int) -> None:
    tokenizer = make_byte_tokenizer()
    guides = Guides(tokenizer, 128, [2])
    made = [guides.make(StructuredOutputsParams(choice=["ab"])) for _ in range(count)]
    right, wrong = tokenizer("ab").input_ids[0], tokenizer("x").input_ids[0]
    take_tokens([(guide, right if number else wrong) for number, guide in enumerate(made)])
    assert str(made[0].error).startswith("PG660 the structured output cannot be gone on with")
    assert all(guide.error is None and guide.is_complete for guide in made[1:])


def test_rows_that_are_free_again_allow_everything() -> None:
    guides, masks = Guides(make_byte_tokenizer(), 128, [2]), MaskBuffers(4, 128, torch.device("cpu"))
    logits = torch.zeros(4, 128)

    def num_allowed(*rows: int) -> list[int]:
        made = [Mock(guide=guides.make(StructuredOutputsParams(choice=["x"])), is_done=False) for _ in rows]
        works = [Mock(request=made.pop() if row in rows else Mock(guide=None), samples=True) for row in range(4)]
        assert masks.collect(works) == bool(rows)
        masks.send()
        return masks.keep_allowed(logits).isfinite().sum(1).tolist()

    assert num_allowed() == [128, 128, 128, 128]
    assert num_allowed(0, 2) == [1, 128, 1, 128]
    assert num_allowed(1, 2) == [128, 1, 1, 128]
    assert num_allowed() == [128, 128, 128, 128]


def test_masks_are_bits_from_the_lowest_on() -> None:
    logits = torch.randn(2, 20).to(torch.bfloat16)
    masks = torch.tensor([[0b101, 0, 0b1000, 0], [255, 255, 255, 255]], dtype=torch.uint8)
    found = keep_allowed(logits, masks)
    assert found.dtype == torch.bfloat16
    assert found[0].isfinite().nonzero().flatten().tolist() == [0, 2, 19]
    assert torch.equal(found[1], logits[1])
    assert keep_allowed(torch.zeros(2, 40), masks)[1].isfinite().sum() == 32
