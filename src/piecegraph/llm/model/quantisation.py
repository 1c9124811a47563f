"""Quantised checkpoints: which are read, and what is said of the others.

Plain weights are run. A few formats are turned into them by transformers while it reads them, or come with modules of
transformers that are run as they are; every other one is refused, whether it is known or not: its packed numbers would
be taken for weights, and its scales would be left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model.checkpoint import Checkpoint

_READ_AS_PLAIN = {"fp8": FineGrainedFP8Config, "mxfp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
"""Formats that transformers turns into plain weights, on every device."""

_RUN_AS_IS = frozenset({"bitnet"})
"""Formats whose modules are made of plain torch operators, which are traced like any others."""

_NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
    "modelopt": "ModelOpt",
}
_WAYS_BACK = {
    "bitsandbytes": "with bitsandbytes, transformers turns it back: model.dequantize(), then save_pretrained",
    "compressed-tensors": "with compressed-tensors, transformers turns it back: from_pretrained(..., "
    "quantization_config=CompressedTensorsConfig(dequantize=True)), then save_pretrained",
}


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a checkpoint that can be loaded are packed."""

    method: str
    """As ``quant_method`` in its config.json; empty: not at all."""

    @property
    def arguments(self) -> dict[str, Any]:
        """For ``from_pretrained``."""
        kind: Any = _READ_AS_PLAIN.get(self.method)
        return {"quantization_config": kind(dequantize=True)} if kind is not None else {}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        if not self.method:
            return ()
        if self.method in _RUN_AS_IS:
            return (Decision("quantisation", self.method, "the modules that transformers has for it are run"),)
        return (Decision("quantisation", f"{self.method}, undone", "plain weights are run"),)


def quantisation_of(checkpoint: Checkpoint) -> Quantisation:
    """How a checkpoint says that it is quantised.

    Raises:
        ModelError: PG669, it is quantised in another way than those that are read.
    """
    method, where = _told_method(checkpoint)
    if not where or method in _READ_AS_PLAIN or method in _RUN_AS_IS:
        return Quantisation(method)
    told = f"quantised by {_NAMES.get(method, method)}" if method else "quantised, by a method that is not named"
    way = f"; {_WAYS_BACK[method]}" if method in _WAYS_BACK else ""
    raise refused_quantisation(checkpoint.path, f"{told} ({where})", way)


def refused_quantisation(path: str, told: str, way: str = "") -> ModelError:
    """What to say of a quantised checkpoint that nobody reads."""
    return ModelError(
        "PG669",
        f"the model at {path} is {told}",
        why="its packed weights and their scales are not read: plain weights are run",
        hint=f"use the checkpoint that it was made from, or one in bfloat16, FP8 (quant_method fp8) or MXFP4{way}",
    )


def make_one_precision(model: Any) -> None:
    """Bring weights that were unpacked to the precision of the others: some are unpacked to bfloat16, always."""
    for weight in model.parameters():
        if weight.dtype == torch.bfloat16:
            weight.data = weight.data.to(model.dtype)


def _told_method(checkpoint: Checkpoint) -> tuple[str, str]:
    """The method and where it is written; nothing where nothing is."""
    config = checkpoint.config
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config", "quantization"):
            told = getattr(part, key, None)
            if told:
                return _method_of(key, told), f"{key} in its config.json"
    of_modelopt = checkpoint.file("hf_quant_config.json")
    if of_modelopt is not None and _is_quantised_by_modelopt(of_modelopt.read_bytes()):
        return "modelopt", of_modelopt.name
    return "", ""


def _method_of(key: str, told: Any) -> str:
    values = told if isinstance(told, dict) else told.to_dict()
    if values.get("load_in_4bit") or values.get("load_in_8bit"):  # written before methods had names
        return "bitsandbytes"
    default = "compressed-tensors" if key == "compression_config" else ""
    return str(getattr(found := values.get("quant_method", default), "value", found) or "")


def _is_quantised_by_modelopt(content: bytes) -> bool:
    """Whether its weights are; a cache may be quantised alone. What cannot be read is not taken for harmless."""
    try:
        return json.loads(content)["quantization"]["quant_algo"] is not None
    except (ValueError, KeyError, TypeError):
        return True
