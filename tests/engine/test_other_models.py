"""Models and modules as other people write them: caches in results, loggers, containers that are written to."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import piecegraph
from piecegraph.base.compare import first_difference
from piecegraph.base.structure import each_once, flatten
from piecegraph.errors import TraceError
from tests.cases.forked import ForkServer

TEXT = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 2,
}  # fmt: skip
LLAMA = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


def tokens(batch: int) -> Tensor:
    return torch.randint(3, 40, (batch, 6))


def pairs(batch: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch), "decoder_input_ids": tokens(batch)}


def features(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 16), "decoder_input_ids": tokens(batch)}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Tensor]]]] = {
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(**TEXT, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        pairs,
    ),
    "bart": (lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**TEXT, **BART)), pairs),
    "whisper": (
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**TEXT, **BART, num_mel_bins=8, max_source_positions=8, max_target_positions=16)
        ),
        features,
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**TEXT, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        ),
        lambda batch: {"input_ids": tokens(batch)},
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **LLAMA)),
        lambda batch: {"input_ids": tokens(batch), "attention_mask": torch.ones(batch, 6, dtype=torch.long)},
    ),
    "mamba": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(**TEXT, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
        lambda batch: {"input_ids": tokens(batch)},
    ),
}


def simulated(model: Any, **arguments: Any) -> Any:
    arguments = {"backend": "eager", "frontend": "trace", "on_fallback": "raise"} | arguments
    return piecegraph.compile(model, options={"graph_device": "simulated"}, **arguments)


def difference(found: Any, expected: Any) -> str | None:
    leaves, _, structure = flatten(found, is_container=each_once())
    wanted, _, wanted_structure = flatten(expected, is_container=each_once())
    return first_difference(leaves, wanted) if structure == wanted_structure else "another structure"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_as_it_comes(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    fast = simulated(model)
    with torch.no_grad():
        calls = [inputs(batch) for batch in (3, 1, 3)]
        found = [fast(**call) for call in calls]  # all are compared later: earlier results keep their values
        for result, call in zip(found, calls, strict=True):
            assert difference(result, model(**call)) is None
    assert len({id(result.past_key_values if name != "mamba" else result.cache_params) for result in found}) == 3
    assert fast.stats()["coverage"] == 1.0


# --- objects in results


class Box:
    def __init__(self, value: Any, owner: Any = None) -> None:
        self.value = value
        self.owner = owner


SHARED = Box(1)


def test_objects_of_a_result_are_made_anew_and_older_ones_returned() -> None:
    fast = simulated(lambda x: {"box": Box([x + 1, x.shape[0]], SHARED), "old": SHARED}, dynamic_dims={"x": 0})
    first, second = fast(torch.zeros(2)), fast(torch.ones(2))
    assert first["box"] is not second["box"]
    assert first["box"].value[0].tolist() == [1, 1]
    assert second["box"].value[0].tolist() == [2, 2]
    assert second["box"].value[1] == 2
    assert second["old"] is second["box"].owner is SHARED


def test_an_object_that_is_there_twice_is_refused() -> None:
    def twice(x: Tensor) -> Any:
        box = Box(x + 1)
        return box, box

    with pytest.raises(TraceError, match=r"PG204 the result holds a Box in \[1\]"):
        simulated(twice)(torch.ones(3))


# --- what changes no tensor


logger = logging.getLogger(__name__)


def says_much(x: Tensor) -> Tensor:
    logger.warning("a row of %s", x.shape[0])
    logger.info("and more")
    warnings.warn("careful", stacklevel=1)
    print("here")
    y = (x + 1).requires_grad_()
    with torch.backends.cudnn.flags(enabled=False):
        return y.detach() * 2


def test_what_changes_no_tensor_is_left_out_and_told() -> None:
    fast = simulated(says_much)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(fast(torch.ones(3)), says_much(torch.ones(3)))
    (told,) = [decision for decision in fast.plan.decisions if decision.subject == "left out of replays"]
    for what in ("logger.warning", "logger.info", "warn", "print", "requires_grad_", "cudnn_flags"):
        assert f"{what} at test_other_models.py:" in told.choice
    assert torch.backends.cudnn.flags.__module__ == "torch.backends.cudnn"


def test_a_flag_that_sets_a_precision_is_not_left_out() -> None:
    def exact(x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(allow_tf32=False):
            return x * 2

    with torch.no_grad(), pytest.raises(TraceError, match="PG201"):
        simulated(exact)(torch.ones(3))


def test_requires_grad_of_an_argument_is_refused() -> None:
    with torch.no_grad(), pytest.raises(TraceError, match="PG201.*requires_grad_"):
        simulated(lambda x: x.requires_grad_() * 2)(torch.ones(3))


class Settings:
    def __init__(self) -> None:
        self.scale, self.names = 2.0, {"a": [1, 2]}


SETTINGS = Settings()


def test_a_copy_of_python_objects() -> None:
    def scaled(x: Tensor) -> Tensor:
        mine = copy.deepcopy(SETTINGS)
        mine.scale = 3.0
        mine.names["a"].append(3)
        return x * mine.scale + len(mine.names["a"])

    assert simulated(scaled)(torch.ones(2)).tolist() == [6, 6]
    assert (SETTINGS.scale, SETTINGS.names) == (2.0, {"a": [1, 2]})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, state = self.lstm(x)
        return self.gru(y)[0], state


class Detector(nn.Module):
    """Anchors are made of a tensor of strides, as in YOLO."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.stride = torch.tensor([8.0, 16.0])

    def forward(self, image: Tensor) -> Any:
        feature = self.conv(image)
        height, width = feature.shape[2:]
        strides = [feature.new_full((height * width, 1), stride) for stride in self.stride]
        best = feature.flatten(2).mean(1).topk(3).indices
        return feature.flatten(2), torch.cat(strides), best, (feature > 0).nonzero().shape[1]


@pytest.mark.parametrize(("model", "shape"), [(Recurrent, (5, 4)), (Detector, (3, 4, 4))])
def test_modules(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = model().eval()
    fast = simulated(module)
    with torch.no_grad():
        for batch in (2, 3, 2):
            x = torch.randn(batch, *shape)
            assert difference(fast(x), module(x)) is None
    assert fast.stats()["coverage"] == 1.0


# --- containers among the arguments


class Pooling(nn.Module):
    """Writes its result into the dictionary it was given, as the modules of sentence-transformers do."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["embedding"] = features["tokens"].mean(1)
        features["rows"] = features["tokens"].shape[0]
        features.pop("mask")
        return features


def test_a_dictionary_that_is_written_to() -> None:
    fast = simulated(Pooling(), dynamic_dims={"features.tokens": 0})
    with torch.no_grad():
        for batch in (2, 3, 1, 2):
            given = {"tokens": torch.randn(batch, 4, 3), "mask": None}
            tensor, expected = given["tokens"], Pooling()(dict(given))
            found = fast(given)
            assert found is given
            assert found["tokens"] is tensor
            assert difference(found, expected) is None
    assert fast.stats()["coverage"] == 1.0


def test_a_list_that_is_added_to() -> None:
    def trace(x: Tensor, seen: list[Any]) -> Tensor:
        seen.append(x * 2)
        return x + 1

    fast = simulated(trace, dynamic_dims={"x": 0})
    for value in (1.0, 2.0):
        seen: list[Any] = []
        assert fast(torch.full((2,), value), seen).tolist() == [value + 1] * 2
        assert [entry.tolist() for entry in seen] == [[2 * value] * 2]


def test_other_changes_of_containers_are_refused() -> None:
    def replaces(x: Tensor, seen: list[Any]) -> Tensor:
        seen[0] = 5
        return x + 1

    def returns_it_inside(x: Tensor, found: dict[str, Any]) -> Any:
        found["y"] = x + 1
        return [found]

    given: list[Any] = [4]
    with pytest.raises(TraceError, match="PG202.*seen"):
        simulated(replaces)(torch.ones(2), given)
    assert given == [4]
    with pytest.raises(TraceError, match="PG202.*found"):
        simulated(returns_it_inside)(torch.ones(2), {})


# --- what the model itself does not take


class TakesThree(nn.Module):
    """Rows are told apart by their first number, which must be new: repeated rows are none."""

    def forward(self, x: Tensor) -> Tensor:
        return distinct(x) * 2


@torch.library.custom_op("pgtest::distinct", mutates_args=())
def distinct(x: Tensor) -> Tensor:
    firsts = x[:, 0].tolist()
    if len(set(firsts)) < len(firsts):
        raise IndexError("a row is there twice")
    return x.clone()


@distinct.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("graph_device", ["auto", "simulated"])
def test_a_size_that_the_model_does_not_take_is_dropped(graph_device: str) -> None:
    options = {"graph_device": graph_device}
    fast = piecegraph.compile(TakesThree(), backend="eager", on_fallback="raise", options=options)
    with torch.no_grad():
        for batch in (3, 4, 3):
            x = torch.arange(batch * 2.0).view(batch, 2)
            assert torch.equal(fast(x), x * 2)
        assert fast.stats()["events"]["PG406"] == 1
        with pytest.raises(IndexError, match="a row is there twice"):
            fast(torch.ones(5, 2))
    assert fast.stats()["replayed"] == 3


# --- the script over many of them


def test_the_script_writes_a_page(forked: ForkServer, tmp_path: Path) -> None:
    results, page = tmp_path / "modules.json", tmp_path / "modules.md"
    arguments = ["--only", "transformers/fnet", "--backend", "eager", "--jobs", "1", "--json", results, "--page", page]
    done = forked.run("scripts/modules.py", *map(str, arguments), cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    (verdict,) = json.loads(results.read_text()).values()
    assert (verdict["verdict"], verdict["frontend"]) == ("equal", "trace")
    assert "| encoder | 1 | 0 | 0 | 0 | 0 | 0 | 0 |" in page.read_text()


class Remembers(nn.Module):
    """Makes a table at the first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.num_made = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
            self.num_made += 1
        return x + self.table


def test_what_is_made_once_and_kept() -> None:
    model = Remembers()
    fast = piecegraph.compile(model, backend="eager", options={"graph_device": "simulated"})
    with torch.no_grad():
        for size in (2, 3, 2):
            x = torch.randn(size, 4)
            assert torch.equal(fast(x), x + torch.arange(4.0))
    assert (model.num_made, fast.stats()["plans"][0]["frontend"]) == (1, "trace")


def test_what_changes_at_every_call_is_refused_and_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model = Counts()
    with torch.no_grad(), pytest.raises(TraceError, match="PG202"):
        piecegraph.compile(model, backend="eager")(torch.ones(3))
    assert model.calls == 0


def test_a_first_call_that_the_model_does_not_take() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[-1] != 4:
            raise ValueError(f"four columns, not {x.shape[-1]}")
        return x * 2

    fast = piecegraph.compile(picky, backend="eager")
    with torch.no_grad():
        with pytest.raises(ValueError, match="four columns, not 5"):
            fast(torch.ones(2, 5))
        assert torch.equal(fast(torch.ones(2, 4)), torch.full((2, 4), 2.0))
