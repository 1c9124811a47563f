"""Quantised checkpoints: read as plain weights, or refused by name. None is served as noise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.errors import ModelError
from piecegraph.llm.model.loader import LoadedModel, load, without_plugs
from tests.cases.checkpoints import save_checkpoint
from tests.cases.quantised import LAYOUTS, Weights, change_config, change_weights, fp8, fp8_scale, in_parts

TOKENS = torch.tensor([[5, 6, 7, 9, 11]])
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8_METHOD = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
IN_FP8 = in_parts({"weight": fp8, "weight_scale_inv": fp8_scale})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", folder, has_tokenizer=False)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def read(folder: Path, **arguments: Any) -> LoadedModel:
    return load(str(folder), **{"dtype": "auto", "device": torch.device("cpu"), "load_format": "auto", **arguments})


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode(), without_plugs(loaded.model):
        return loaded.model(TOKENS).logits


@pytest.mark.parametrize("method", LAYOUTS)
def test_a_method_that_is_not_read_is_named(method: str, folder: Path) -> None:
    values, change = LAYOUTS[method]
    change_weights(folder, change)
    change_config(folder, quantization_config={"quant_method": method, **values})
    with pytest.raises(
        ModelError, match=f"(?i)PG669 .* is quantised by {method}.*quantization_config in its"
    ) as raised:
        read(folder)
    assert "plain weights are run" in raised.value.why
    assert "use the checkpoint that it was made from" in raised.value.hint
    assert ("save_pretrained" in raised.value.hint) == (method in ("bitsandbytes", "compressed-tensors"))


@pytest.mark.parametrize("method", LAYOUTS)
def test_a_method_that_is_not_told_is_seen_by_the_weights(method: str, folder: Path) -> None:
    change_weights(folder, LAYOUTS[method][1])
    with pytest.raises(ModelError, match=r"PG669 .* in a way that its config.json does not tell: it holds model\.lay"):
        read(folder)


def test_packed_types_alone_are_seen(folder: Path) -> None:
    change_weights(folder, in_parts({"weight": fp8}))
    with pytest.raises(ModelError, match=r"PG669 .*: it holds model.layers.0.mlp.down_proj.weight \(F8_E4M3\), "):
        read(folder)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"quantization_config": {"quant_method": "of next year"}}, "quantised by of next year"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "quantised, by a method that is not named"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantised by bitsandbytes"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantised, by a method that is not named"),
        ({"compression_config": {"format": "dense"}}, "quantised by compressed-tensors"),
    ],
)
def test_other_ways_to_tell_it(values: dict[str, Any], told: str, folder: Path) -> None:
    change_config(folder, **values)
    with pytest.raises(ModelError, match=f"PG669 .*{told}"):
        read(folder)


@pytest.mark.parametrize("content", ['{"quantization": {"quant_algo": "FP8"}}', "{", "{}"])
def test_the_file_of_modelopt(content: str, folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"PG669 .* quantised by ModelOpt \(hf_quant_config.json\)"):
        read(folder)


def test_only_the_cache_is_quantised(folder: Path) -> None:
    told = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    change_weights(folder, lambda weights: weights | {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())})
    assert [decision.subject for decision in read(folder).decisions] == ["unused weights"]


def test_dummy_weights_need_no_unpacking(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "awq"})
    assert read(folder, load_format="dummy").model.dtype == torch.float32


# ------------------------------------------------------------------ what is read


def test_fp8_is_unpacked(llama: Path, folder: Path) -> None:
    plain = read(llama).model.state_dict()
    change_weights(folder, IN_FP8)
    change_config(folder, quantization_config=FP8_METHOD)
    loaded = read(folder)
    assert "quantisation: fp8, undone (plain weights are run)" in map(str, loaded.decisions)
    for name, weight in loaded.model.state_dict().items():
        expected = fp8(plain[name]).float() * fp8_scale(plain[name]) if "_proj" in name else plain[name]
        torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: {n: t for n, t in w.items() if "1.mlp.up_proj.weight_scale" not in n}, "PG661 .*lack the scales of"),
        (
            lambda w: {n.replace("scale_inv", "scale"): t for n, t in w.items()},
            "PG669 .*it holds .*down_proj.weight_scale",
        ),
    ],
    ids=["dropped", "renamed"],
)
def test_fp8_without_its_scales_is_refused(change: Callable[[Weights], Weights], why: str, folder: Path) -> None:
    change_weights(folder, lambda weights: change(IN_FP8(weights)))
    change_config(folder, quantization_config=FP8_METHOD)
    with pytest.raises(ModelError, match=why):
        read(folder)


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_mxfp4_is_unpacked_to_the_precision_of_the_rest(dtype: Any, tmp_path: Path) -> None:
    plain = save_checkpoint("gpt_oss", tmp_path, has_tokenizer=False)
    numbers = torch.Generator().manual_seed(0)
    unpacked: Weights = {}

    def pack(weights: Weights) -> Weights:
        packed = {}
        for name, weight in weights.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                packed[name] = unpacked[name] = weight
                continue
            num_experts, num_in, num_out = weight.shape
            shape = (num_experts, num_out, num_in // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=numbers, dtype=torch.uint8)
            scales = torch.randint(118, 123, shape, generator=numbers, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(-2)
            values = torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)
            unpacked[name] = values.transpose(1, 2).contiguous()
        return packed

    change_weights(tmp_path, pack)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    loaded = read(tmp_path, dtype=dtype)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32 if dtype == "auto" else dtype}
    plain.load_state_dict(unpacked)
    with torch.inference_mode():
        expected = plain(TOKENS).logits
    error = (logits(loaded) - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == "auto" else 0.05)


def test_bitnet_runs_in_its_own_modules(folder: Path) -> None:
    pack: Any = pytest.importorskip("transformers.integrations.bitnet").pack_weights
    ternary = in_parts(
        {
            "weight": lambda weight: pack((weight / weight.abs().mean()).round().clamp(-1, 1)),
            "weight_scale": lambda weight: weight.abs().mean().reshape(1),
        }
    )
    change_weights(folder, ternary)
    method = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    change_config(folder, quantization_config=method)
    with torch.compiler.set_stance("force_eager"):  # transformers compiles what unpacks them
        loaded = read(folder)
    assert "quantisation: bitnet (the modules that transformers has for it are run)" in map(str, loaded.decisions)
    assert type(loaded.model.model.layers[0].mlp.up_proj).__name__ == "AutoBitLinear"
