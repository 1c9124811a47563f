"""Every weight of a model comes from its files, and every weight of the files has its place: or it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.errors import ModelError
from piecegraph.llm.model.loader import LoadedModel, load
from piecegraph.llm.model.weights import check_weights
from tests.cases.checkpoints import save_checkpoint
from tests.cases.llms import CONFIGS
from tests.cases.quantised import Weights, change_config, change_weights

LAST = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", folder, has_tokenizer=False)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def read(folder: Path) -> LoadedModel:
    return load(str(folder), dtype="auto", device=torch.device("cpu"), load_format="auto")


def renamed(weights: Weights) -> Weights:
    return {name.replace("2.mlp.up_proj", "2.mlp.upper_proj"): weight for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda weights: {n: w for n, w in weights.items() if n != LAST}, f"its files lack {LAST}"),
        (renamed, f"its files lack {LAST} and hold .*upper_proj.weight, which LlamaForCausalLM has no place for"),
        (
            lambda weights: weights | {"model.extra.weight": torch.ones(3)},
            "its files hold model.extra.weight, which LlamaForCausalLM has no place for",
        ),
        (
            lambda weights: weights | {LAST: torch.ones(95, 64)},
            rf"{LAST} is of shape \(95, 64\) in its files, and of \(96, 64\) by its config.json",
        ),
    ],
    ids=["dropped", "renamed", "extra", "shape"],
)
def test_weights_that_do_not_fit(change: Callable[[Weights], Weights], why: str, folder: Path) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=f"PG661 the model at .* cannot be loaded: {why}"):
        read(folder)


def test_a_config_of_fewer_layers_than_the_files_have(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2, layer_types=None)
    with pytest.raises(ModelError, match=r"PG661 .* hold model\.layers\.2\..* and 6 more, which LlamaFor"):
        read(folder)
    change_config(folder, num_nextn_predict_layers=1)
    assert [decision.subject for decision in read(folder).decisions] == ["unused weights"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)),
        ("model.layers.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.uint8)),
        ("model.layers.0.attention.masked_bias", torch.tensor(-1e4)),
        ("model.embeddings.position_ids", torch.arange(8)),
        ("mtp.layers.0.weight", torch.ones(8)),
        ("model.visual.patch.weight", torch.ones(8)),
    ],
)
def test_weights_that_take_no_part_in_an_answer(name: str, value: torch.Tensor, folder: Path) -> None:
    change_weights(folder, lambda weights: weights | {name: value})
    told = [str(decision) for decision in read(folder).decisions]
    # Transformers itself says nothing of some of them.
    assert told in ([], [f"unused weights: {name} (no part of an answer)"])


def test_a_tied_head_may_be_in_the_files_or_not(folder: Path) -> None:
    def tied(weights: Weights) -> Weights:
        return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, tied)
    assert read(folder).decisions == ()
    change_weights(folder, lambda weights: {n: w for n, w in weights.items() if n != "lm_head.weight"})
    model = read(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_plain_types_are_taken(dtype: torch.dtype, folder: Path) -> None:
    change_weights(folder, lambda weights: {name: weight.to(dtype) for name, weight in weights.items()})
    assert read(folder).decisions == ()


def test_files_that_hold_less_than_the_model(folder: Path) -> None:
    """Also if transformers said that nothing is missing."""
    from piecegraph.llm.model.checkpoint import find_checkpoint

    model = read(folder).model
    change_weights(folder, lambda weights: {n: w for n, w in weights.items() if n != LAST})
    nothing: Any = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    with pytest.raises(ModelError, match="PG661 .* its files hold .* numbers, and LlamaForCausalLM needs"):
        check_weights(find_checkpoint(str(folder)), model, nothing, is_quantised=False)


def test_weights_in_several_files(tmp_path: Path) -> None:
    from tests.cases.llms import tiny_model

    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read(tmp_path).decisions == ()
    first = min(tmp_path.glob("*.safetensors"))
    first.rename(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="PG661 .* its files lack"):
        read(tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_all_families_are_loaded_whole(family: str, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path, has_tokenizer=False)
    assert [decision.subject for decision in read(tmp_path).decisions] == []
