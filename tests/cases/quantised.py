"""Folders of a tiny Llama in the layouts of those who quantise checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
FP8_LARGEST = 448.0


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def in_parts(parts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[Weights], Weights]:
    """Put several tensors in the place of each linear's weight, named from the linear."""

    def change(weights: Weights) -> Weights:
        packed = {}
        for name, weight in weights.items():
            linear = name.removesuffix(".weight")
            named = {f"{linear}.{part}": make(weight) for part, make in parts.items()} if "_proj" in name else {}
            packed |= named or {name: weight}
        return packed

    return change


def fp8(weight: torch.Tensor) -> torch.Tensor:
    return (weight / fp8_scale(weight)).to(torch.float8_e4m3fn)


def fp8_scale(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max() / FP8_LARGEST


def _int32(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)


def _int8(weight: torch.Tensor) -> torch.Tensor:
    return (weight / weight.abs().max() * 127).to(torch.int8)


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)


def _one(weight: torch.Tensor) -> torch.Tensor:
    return torch.ones(1)


_ACT_ORDER = {"qweight": _int32, "qzeros": _int32, "scales": _one}

LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Weights], Weights]]] = {
    "awq": ({"bits": 4, "group_size": 32}, in_parts(_ACT_ORDER)),
    "gptq": ({"bits": 4, "group_size": 32}, in_parts(_ACT_ORDER | {"g_idx": _int32})),
    "bitsandbytes": (
        {"load_in_4bit": True},
        in_parts({"weight": _bytes, "weight.absmax": _one, "weight.quant_state.bitsandbytes__nf4": _bytes}),
    ),
    "compressed-tensors": ({"format": "float-quantized"}, in_parts({"weight": fp8, "weight_scale": fp8_scale})),
    "torchao": ({"quant_type": {}}, in_parts({"_weight_qdata": _int8, "_weight_scale": _one})),
    "modelopt": (
        {"quant_algo": "FP8"},
        in_parts({"weight": fp8, "weight_scale": fp8_scale, "input_scale": _one}),
    ),
}
"""For each method: what config.json says beside its name, and what becomes of the weights."""
