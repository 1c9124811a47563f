"""Language models and bad input: a clear error, for one request alone where it is one request's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import piecegraph
from piecegraph.errors import ConfigError, ModelError, RequestError
from piecegraph.llm import parts, startup
from piecegraph.llm.model import checkpoint, traced_model
from piecegraph.llm.model.tokenizer import read_tokenizer
from tests.cases.llm_shelf import Shelf, shelf


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(tmp_path_factory.mktemp("models")) as found:
        yield found


@pytest.fixture(scope="module")
def llm(models: Shelf) -> piecegraph.LLM:
    return models.load("llama", max_model_len=48, options={"block_size": 4, "cache_tokens": 40})


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the arguments or the files is told before minutes are spent on compiling."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(startup, "trace_model", fail)


# ------------------------------------------------------------------ no model


@pytest.fixture
def folder(models: Shelf, tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(models.path("llama"), tmp_path / "copy"))


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("nothing")
    for path, why in ((tmp_path, "it holds no config.json"), (tmp_path / "file", "it is a file")):
        with pytest.raises(ModelError, match=rf"PG661 .* is no model: {why}. hint: give the folder"):
            piecegraph.LLM(path)
    for path in (tmp_path / "missing", "./missing", "a/b/missing", "x" * 5000):
        with pytest.raises(ModelError, match='PG661 .* is no model: there is no such folder. hint: .*"org/model"'):
            piecegraph.LLM(path)


def test_a_name_that_transformers_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(path: str, **_: Any) -> None:
        raise OSError(f"{path} is not cached")

    monkeypatch.setattr(checkpoint, "_hub_answers", lambda: True)
    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", find)
    with pytest.raises(ModelError, match="PG661 org/model is no model: no such folder, and no name that"):
        piecegraph.LLM("org/model")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model_type": "no such family"}', "null", "3", pytest.param("[" * 100_000, id="deep")],
)
def test_a_damaged_configuration(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="PG661 .* is no model: its config.json cannot be (read|used): "):
        piecegraph.LLM(folder)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("hidden_size", "abc", "config.json cannot be used: .*'hidden_size' expected int, got str"),
        ("num_attention_heads", 0, "config.json cannot be used: ZeroDivisionError"),
        ("num_attention_heads", 3, "config.json cannot be used: .*not a multiple of the number of attention heads"),
        ("dtype", "floatx", "config.json cannot be used: .*floatx"),
        ("num_hidden_layers", 0, "config.json says num_hidden_layers is 0"),
        ("vocab_size", 0, "config.json says vocab_size is 0"),
        (
            "vocab_size",
            64,
            r"lm_head.weight is of shape \(128, 64\) in its files, and of \(64, 64\) by its conf",
        ),
        ("hidden_act", "foo", "KeyError: 'foo'. hint: check its files \\(config.json, model.safetensors\\)"),
    ],
)
@pytest.mark.usefixtures("no_trace")
def test_values_that_a_configuration_cannot_have(name: str, value: Any, why: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ModelError, match=f"PG661 .*{why}"):
        piecegraph.LLM(folder)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_damaged_generation_config(text: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match="PG661 .* is no model: its generation_config.json cannot be read: "):
        piecegraph.LLM(folder)


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_damaged_weights_of_pytorch(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"PG661 .* no checkpoint of PyTorch. hint: check .*pytorch_model.bin\)"):
        piecegraph.LLM(folder)


def test_code_of_a_model_is_not_run_and_nobody_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: str) -> str:
        raise AssertionError("nobody is there to answer")

    monkeypatch.setattr("builtins.input", ask)
    own = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | own))
    (folder / "own.py").write_text("raise AssertionError('run')")
    with pytest.raises(ModelError, match="PG661 .*code that comes with the model, and such code is not run"):
        piecegraph.LLM(folder)


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage", "incomplete"])
def test_damaged_weights(damage: str, folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "incomplete":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "layer_types": None}))
    written = {"empty": b"", "cut": content[:-100], "garbage": b"\xff" * 1000, "incomplete": content}
    if damage in written:
        weights.write_bytes(written[damage])
    with pytest.raises(ModelError, match="PG661 the model at .* cannot be loaded: ") as raised:
        piecegraph.LLM(folder)
    if damage == "incomplete":
        assert raised.value.why.startswith("its files lack model.layers.3.")


def test_weights_that_are_not_numbers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = (
        "PG664 LlamaForCausalLM gives no answer: the model gave NaN or infinity, and so does transformers. hint: look"
    )
    with pytest.raises(ModelError, match=told):
        piecegraph.LLM(folder, backend="eager")


def test_answers_that_differ_from_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(model: Any) -> Any:
        return lambda hidden: 1.1 * model.lm_head(hidden)

    monkeypatch.setattr(traced_model, "Head", scaled)
    with pytest.raises(ModelError, match=r"PG664 .* differ by 10.0% of their norm \(0.2% is allowed\)"):
        piecegraph.LLM(folder, backend="eager")
    unchecked = piecegraph.LLM(folder, backend="eager", options={"self_check": False})
    assert unchecked.generate([5, 6], max_new_tokens=1)[0].error is None


def test_a_model_without_a_tokenizer_takes_token_ids(models: Shelf, folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    llm = piecegraph.LLM(folder, backend="eager")
    text, tokens = llm.generate(["to be", [5, 6, 7]], max_new_tokens=4, ignore_eos=True, on_error="return")
    assert (text.finish_reason, text.error.code, text.text) == ("error", "PG666", None)
    assert "give prompts as lists of token ids" in str(text.error)
    assert (tokens.token_ids, tokens.text) == (models.greedy("llama", [5, 6, 7], 4), None)
    with pytest.raises(ModelError, match="PG666"):
        llm.generate([5, 6, 7], stop="x")  # it would never be found
    with pytest.raises(ModelError, match="PG666"):
        _ = llm.tokenizer
    assert [chunk.text for chunk in llm.generate([5, 6, 7], max_new_tokens=2, stream=True)] == ["", ""]


def test_a_tokenizer_that_transformers_made_up_is_none(tmp_path: Path) -> None:
    hf.Qwen3Config().save_pretrained(tmp_path)
    assert len(hf.AutoTokenizer.from_pretrained(tmp_path)("to be")["input_ids"]) == 0
    assert read_tokenizer(str(tmp_path), is_local=True) == (None, "its folder has no vocabulary")


# ------------------------------------------------------------------ bad requests beside good ones

GOOD = [5, 6, 7]
MESSAGE = {"role": "user", "content": "to be"}


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "PG651"),
        ("", "PG651"),
        ([9] * 48, "PG652"),
        ([5, -1], "PG653"),
        ([5, 128], "PG653"),
        ([5, 2**70], "PG653"),
        ([5, 0.5], "PG653"),
        ([5, "six"], "PG653"),
        ([True, False], "PG653"),
        (None, "PG653"),
        (b"12345678", "PG653"),
        ({"input_ids": [5]}, "PG653"),
        (0.5, "PG653"),
        ("\udc80bad", "PG653"),
        ([9] * 41, "PG654"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_prompt_is_refused_and_the_others_are_answered(
    prompt: Any, code: str, stream: bool, llm: piecegraph.LLM, models: Shelf
) -> None:
    asked = [GOOD, prompt, GOOD]
    with pytest.raises((RequestError, ConfigError), match=rf"{code} .* at prompts\[1\]"):
        list(llm.generate(asked, max_new_tokens=4, stream=stream))
    assert llm.started.engine.scheduler.num_unfinished == 0
    answers = llm.generate(asked, max_new_tokens=4, ignore_eos=True, stream=stream, on_error="return")
    if stream:
        finished = [(chunk.index, chunk.finished) for chunk in answers if chunk.finished is not None]
        answers = [answer for _, answer in sorted(finished, key=lambda pair: pair[0])]
    first, bad, last = answers
    assert (bad.finish_reason, bad.error.code, bad.token_ids) == ("error", code, [])
    assert bad.error.why
    assert "at prompts[1]" in str(bad.error)
    assert "request '" not in str(bad.error), "nobody gave it a number"
    assert first.token_ids == last.token_ids == models.greedy("llama", GOOD, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2.5),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_bad_number_is_one_request_s_or_the_whole_call_s(
    name: str, value: Any, llm: piecegraph.LLM, models: Shelf
) -> None:
    fine: Any = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 16, "seed": 1}[name]
    answers = llm.generate([GOOD, GOOD, GOOD], ignore_eos=True, on_error="return", **{name: [fine, value, fine]})
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert answers[1].error.code == "PG108"
    assert str(answers[1].error).startswith(f"PG108 {name} is {value!r} at prompts[1]: ")
    assert answers[0].token_ids == answers[2].token_ids == models.greedy("llama", GOOD, 16)
    with pytest.raises(ConfigError, match=f"PG108 {name} is"):
        llm.generate([GOOD, GOOD], **{name: value})


@pytest.mark.parametrize(("name", "value"), [("logprobs", -1), ("prompt_logprobs", 1.5), ("stop", ""), ("stop", [3])])
def test_what_is_wrong_for_all_is_raised(name: str, value: Any, llm: piecegraph.LLM) -> None:
    with pytest.raises(ConfigError, match=f"PG108 {name} is"):
        llm.generate([GOOD, GOOD], **{name: value})


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, iter])
def test_numbers_and_lists_of_other_libraries_are_taken(kind: Any, llm: piecegraph.LLM) -> None:
    plain = llm.generate([GOOD, GOOD], ignore_eos=True, max_new_tokens=[3, 4], temperature=[0.5, 0.0], seed=7)
    other = llm.generate(
        [GOOD, GOOD],
        ignore_eos=True,
        max_new_tokens=kind([3, 4]),
        temperature=kind([0.5, 0.0]),
        seed=np.uint64(7),
        top_p=np.float32(1),
        top_k=np.int32(0),
    )
    assert [answer.token_ids for answer in other] == [answer.token_ids for answer in plain]
    with pytest.raises(ConfigError, match="PG108 max_new_tokens has 3 values: there are 2 prompts"):
        llm.generate([GOOD, GOOD], max_new_tokens=kind([3, 4, 5]))


def test_stop_texts_of_any_iterable(llm: piecegraph.LLM) -> None:
    whole, unstopped = llm.generate(["to be", GOOD], ignore_eos=True, stop=None)
    stop = whole.text[-3:]
    for given in (stop, [stop], {stop}, iter([stop])):
        assert llm.generate(["or", "to be"], ignore_eos=True, stop=given)[1].text == whole.text.partition(stop)[0]
    assert unstopped.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_gradients_may_flow_through_hidden_states(stream: bool, llm: piecegraph.LLM) -> None:
    answer = list(llm.generate(GOOD, max_new_tokens=2, return_hidden_states=True, stream=stream))[-1]
    if stream:
        answer = answer.finished
    assert not answer.hidden_states.is_inference()
    probe = torch.nn.Linear(64, 1)
    probe(answer.hidden_states).sum().backward()
    assert probe.weight.grad is not None


@pytest.mark.parametrize("conversation", [5, None, b"hello", ["hello"], {"role": "user"}])
def test_a_conversation_of_no_kind(conversation: Any, llm: piecegraph.LLM) -> None:
    with pytest.raises(ConfigError, match="PG101 conversation is .*: it must be a text, or a list of messages"):
        llm.chat_prompt(conversation)


@pytest.mark.parametrize("prompts", [None, 5, 0.5, b"bytes", {"a": 1}, np.array(5), torch.tensor(5)])
def test_prompts_of_no_kind(prompts: Any, llm: piecegraph.LLM) -> None:
    with pytest.raises(ConfigError, match="PG101 prompts is"):
        llm.generate(prompts)


@pytest.mark.parametrize("prompts", [[MESSAGE], [MESSAGE, MESSAGE], [[MESSAGE], [MESSAGE]]])
def test_messages_are_no_prompts(prompts: Any, llm: piecegraph.LLM) -> None:
    with pytest.raises(ConfigError, match=r"PG101 prompts holds messages: .* hint: llm\.chat"):
        llm.generate(prompts)


@pytest.mark.parametrize("flags", [{"stream": "yes"}, {"stream": 1}, {"on_error": "ignore"}])
def test_how_answers_are_given_back(flags: Any, llm: piecegraph.LLM) -> None:
    with pytest.raises(ConfigError, match=f"PG101 {next(iter(flags))} is"):
        llm.generate(GOOD, **flags)


# ------------------------------------------------------------------ bad settings


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float99"},
        {"dtype": "int8"},
        {"dtype": torch.int64},
        {"dtype": "nn"},
        {"device": "toaster"},
        {"device": "meta"},
        {"device": 3.5},
        {"backend": "tvm"},
        {"backend": 3},
        {"attention": "flash9"},
        {"load_format": "gguf"},
        {"max_model_len": 1},
        {"max_model_len": 513},
        {"max_model_len": "long"},
        {"max_num_seqs": 0},
        {"max_num_seqs": 2.0},
        {"max_num_seqs": "4"},
        {"max_batch_tokens": -4},
        {"max_batch_tokens": 8, "max_num_seqs": 9},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.5},
        {"memory_fraction": float("nan")},
        {"memory_fraction": "half"},
        {"memory_fraction": True},
        {"prefix_cache": "yes"},
        {"cudagraph_mode": "sometimes"},
        {"seed": "lucky"},
        {"options": {"block_size": 0}},
        {"options": {"cache_tokens": 0}},
        {"options": {"look_ahead": 2}},
        {"options": {"graph_device": "real"}},
        {"options": {"blocksize": 4}},
        {"options": {"inductor": 5}},
    ],
    ids=str,
)
def test_bad_settings_are_told_before_anything_is_compiled(arguments: dict[str, Any], models: Shelf) -> None:
    with pytest.raises(ConfigError, match="PG101") as raised:
        piecegraph.LLM(models.path("llama"), **arguments)
    name = next(iter(arguments["options"])) if "options" in arguments else next(iter(arguments))
    assert name.replace("_", " ") in str(raised.value).replace("_", " ")


@pytest.mark.parametrize("sizes", [[], [0], 5, "all", [1.5], [True]])
def test_bad_capture_sizes(sizes: Any, models: Shelf) -> None:
    with pytest.raises(ConfigError, match="PG102 capture_sizes is"):
        piecegraph.LLM(models.path("llama"), capture_sizes=sizes)


@pytest.mark.parametrize("sizes", [np.array([1, 4]), torch.tensor([1, 4]), (1, 4), range(1, 5, 3), iter([1, 4])])
def test_capture_sizes_of_any_kind(sizes: Any, models: Shelf) -> None:
    llm = models.load("llama", capture_sizes=sizes, max_num_seqs=np.int64(4), memory_fraction=np.float32(0.125))
    assert llm.config.capture_sizes == (1, 4)
    assert type(llm.config.max_num_seqs) is int


def test_the_default_of_one_limit_follows_the_other(models: Shelf) -> None:
    config = models.load("llama", max_batch_tokens=8).config
    assert (config.max_num_seqs, config.max_batch_tokens) == (8, 8)
    config = models.load("llama", max_num_seqs=600).config
    assert (config.max_num_seqs, config.max_batch_tokens) == (600, 600)


@pytest.mark.parametrize("path", [None, 5, "", b"/tmp"])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(ConfigError, match="PG101 path is .*: it must be a folder with a model, a name"):
        piecegraph.LLM(path)


def test_a_model_is_no_path(models: Shelf) -> None:
    with pytest.raises(ConfigError, match="PG101 path is a LlamaForCausalLM: .* hint: give the folder") as raised:
        piecegraph.LLM(models.reference("llama"))
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpu_memory_utilization", "here it is memory_fraction"),
        ("max_num_batched_tokens", "here it is max_batch_tokens"),
        ("enable_prefix_caching", "here it is prefix_cache"),
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("block_size", "here it is options={'block_size': ...}"),
        ("swap_space", "known arguments: attention, backend, "),
    ],
)
def test_names_of_other_libraries(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"PG101 unknown argument '{name}'. hint: {re.escape(hint)}"):
        piecegraph.LLM("anything", **{name: 1})


@pytest.mark.parametrize("options", [5, [1], "abc"])
def test_options_that_are_no_dictionary(options: Any, models: Shelf) -> None:
    with pytest.raises(ConfigError, match="PG101 options is .*: it must be a dictionary"):
        piecegraph.LLM(models.path("llama"), options=options)


def test_a_typo_in_an_option_is_recognised(models: Shelf) -> None:
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        piecegraph.LLM(models.path("llama"), options={"blocksize": 4})


def test_no_room_for_the_cache(models: Shelf) -> None:
    with pytest.raises(ModelError, match="PG665 there is no room for the cache"):
        models.load("llama", memory_fraction=1e-12)


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_tokens"])
@pytest.mark.parametrize("value", [10**9, 10**20])
def test_limits_beyond_any_memory_are_refused_before_anything_is_allocated(
    name: str, value: int, models: Shelf
) -> None:
    with pytest.raises(ModelError, match=f"PG665 .*{name}={value}.*: their buffers take .* MiB, and there is room for"):
        models.load("llama", **{name: value})


def test_no_room_for_states(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "state_bytes", lambda layers, num_slots: num_slots * 2**50)
    with pytest.raises(ModelError, match="PG665 .*states of max_num_seqs=2: they take 3221225472 MiB, and"):
        models.load("llama", max_num_seqs=2)


def test_the_smallest_limits_are_enough(models: Shelf) -> None:
    llm = models.load("llama", max_model_len=2, max_num_seqs=1, max_batch_tokens=1)
    assert llm.generate([[5], [6]])[1].token_ids == models.greedy("llama", [6], 1)


def test_a_model_that_branches_on_its_size_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y if x.shape[1] <= 100 else 2 * y

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(
        ModelError, match="PG662 LlamaForCausalLM cannot run steps of 512 tokens: the plan holds only w"
    ):
        piecegraph.LLM(folder, backend="eager")
    assert piecegraph.LLM(folder, backend="eager", max_batch_tokens=100).generate(GOOD)[0].error is None
