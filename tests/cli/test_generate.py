"""``piecegraph generate``: text as it comes, one document, and errors with their code."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import piecegraph
from piecegraph.cli.answers import Answers
from piecegraph.llm.run.results import Chunk, Completion
from tests.cases.commands import Run, runner
from tests.cases.tiny_llm import write_tiny_llm

FEW = ("--max-new-tokens", "5")
pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("generate", monkeypatch, capsys)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Completion]:
    """What the library answers, to prompts with the chat template (their text) and without ("raw: ...")."""
    llm = piecegraph.LLM(model, backend="eager")
    texts = ["ax by", "cz"]
    asked = [*map(llm.chat_prompt, texts), *texts]
    found = llm.generate(asked, max_new_tokens=5)
    return dict(zip([*texts, *(f"raw: {text}" for text in texts)], found, strict=True))


# ------------------------------------------------------------------ answers


def test_one_prompt_is_answered_with_its_text_alone(model: str, run: Run, expected: dict[str, Completion]) -> None:
    done = run(model, "ax by", *FEW)
    assert done.code == 0
    assert done.out == f"{expected['ax by'].text}\n"
    assert "5 tokens in " in done.err
    assert "graph coverage 0% (cpu has no graphs), no fallbacks" in done.err
    assert len(done.err.splitlines()) == 1, "nothing but our line"


def test_text_is_shown_as_it_comes(
    model: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    original = Answers.add

    def add(answers: Answers, chunk: Chunk) -> None:
        original(answers, chunk)
        shown.append(capsys.readouterr().out)

    monkeypatch.setattr(Answers, "add", add)
    assert run(model, "ax by", *FEW).code == 0
    assert len([text for text in shown if text.strip()]) > 1
    assert len("".join(shown).split()) == 5


def test_several_prompts_are_answered_in_their_order(model: str, run: Run, expected: dict[str, Completion]) -> None:
    done = run(model, "ax by", "-", "--raw", *FEW, stdin=b"cz\n")
    texts = [expected["raw: ax by"].text, expected["raw: cz"].text]
    assert done.out == f"[1] ax by\n{texts[0]}\n\n[2] cz\n{texts[1]}\n"


def test_one_document(model: str, run: Run, expected: dict[str, Completion]) -> None:
    begun = time.perf_counter()
    done = run(model, *FEW, "--json", "--explain", stdin=b"ax by")
    wall = time.perf_counter() - begun
    found = json.loads(done.out)
    assert done.code == 0
    assert done.err == ""
    (answer,) = found["answers"]
    assert answer["prompt"] == "ax by"
    for name in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
        assert answer[name] == getattr(expected["ax by"], name)
    assert answer["error"] is None
    assert answer["metrics"]["num_new_tokens"] == 5
    assert (found["device"], found["dtype"], found["backend"]) == ("cpu", "float32", "eager")
    assert found["stages_s"].keys() >= {"import", "load", "trace", "compile", "check", "generate"}
    assert 0.8 * wall < sum(found["stages_s"].values()) - found["stages_s"]["import"] <= wall
    assert "start-up" in found["explain"]
    assert found["fallbacks"] == {}


def test_sampling_follows_its_seed(model: str, run: Run) -> None:
    arguments = (model, "ax by", "--max-new-tokens", "12", "--temperature", "2", "--top-k", "20", "--top-p", "0.99")
    first, again, other = (run(*arguments, "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


# ------------------------------------------------------------------ errors


def test_a_prompt_that_is_refused_does_not_stop_the_others(model: str, run: Run) -> None:
    done = run(model, "ax " * 70, "by", *FEW)
    assert done.code == 1
    assert "error: prompt 1: PG652 " in done.err
    assert len(done.out.rpartition("[2] by\n")[2].split()) == 5
    document = run(model, "ax " * 70, *FEW, "--json")
    assert document.code == 1
    assert json.loads(document.out)["answers"][0]["error"]["code"] == "PG652"


@pytest.mark.parametrize("how", [(), ("--raw",)])
def test_an_empty_prompt_does_not_stop_the_others(how: tuple[str, ...], model: str, run: Run) -> None:
    done = run(model, "", "by", *how, *FEW)
    assert done.code == 1
    assert "error: prompt 1: PG651 the prompt is empty at prompts[0]: " in done.err
    assert len(done.out.rpartition("[2] by\n")[2].split()) == 5


def test_no_model(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path), "ax")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: PG661 ")


def test_a_model_without_a_tokenizer(model: str, run: Run, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(model) / name)
    done = run(str(tmp_path), "ax")
    assert done.code == 1
    assert "error: PG666 " in done.err


def test_a_chat_template_that_refuses(model: str, run: Run, tmp_path: Path) -> None:
    write_tiny_llm(tmp_path, chat=False)
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    done = run(str(tmp_path), "ax")
    assert done.code == 1
    assert "error: PG667 the chat template cannot be applied" in done.err
    assert "roles must alternate" in done.err
    assert run(str(tmp_path), "ax", "--raw", *FEW).code == 0


def test_a_number_that_is_none_is_told_before_the_model_is_loaded(run: Run) -> None:
    for option, value, said in (
        ("--temperature", "nan", "PG108 temperature is nan"),
        ("--seed", "1" + "0" * 23, "PG108 seed is 1000"),
        ("--device", "foo", "PG101 device is 'foo'"),
        ("--dtype", "foo", "PG101 dtype is 'foo'"),
    ):
        done = run("no/such/model", "ax", option, value)
        assert done.code == 2, "called wrongly"
        assert done.err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ((), b"", "Missing argument 'MODEL'"),
        (("m",), b"", "The prompt is empty"),
        (("m", ""), b"", "The prompt is empty"),
        (("m", "", ""), b"", "The prompt is empty"),
        (("m", "-", "-"), b"a", "Only one prompt"),
        (("m",), b"\xff\xfe", "not UTF-8"),
        (("m", "a\udcff"), b"", "Prompt 1 is not UTF-8"),
        (("m", "a", "--temperature", "-1"), b"", "--temperature"),
        (("m", "a", "--top-p", "0"), b"", "--top-p"),
        (("m", "a", "--top-p", "0.5"), b"", "--top-p has no effect without --temperature"),
        (("m", "a", "--top-k", "5"), b"", "--top-k has no effect without --temperature"),
        (("m", "a", "--max-new-tokens", "0"), b"", "--max-new-tokens"),
        (("m", "a", "--backend", "magic"), b"", "--backend"),
    ],
)
def test_wrong_calls(arguments: tuple[str, ...], stdin: bytes, said: str, run: Run) -> None:
    done = run(*arguments, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_terminal_is_not_waited_for(run: Run) -> None:
    done = run("m", stdin=None)
    assert done.code == 2
    assert "give a prompt, or pipe one in" in done.err


def test_an_interrupt_ends_without_a_traceback(model: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(answers: Answers, chunk: Chunk) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Answers, "add", interrupt)
    assert run(model, "ax", *FEW) == (130, "", "\n")
