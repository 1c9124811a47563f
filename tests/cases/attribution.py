"""Models whose kernels are attributed, and a truth that is found in another way: by the weights that ops read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, LlamaConfig, Qwen3Config

from piecegraph.base.origin import GraphRecord, LaunchCall
from piecegraph.provenance.launch import Launch
from piecegraph.tape.tape import GraphStep, Tape

MATMULS = ("aten::mm", "aten::addmm", "aten::linear")
SPLITTING_OPS = ["aten::scaled_dot_product_attention"]


class Decoder(torch.nn.Module):
    """A decoder of transformers that takes token ids and nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden


def make_decoder(family: str, size: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """``llama`` or ``qwen3``, ``tiny`` or ``1b``; the query projections of a tiny one all have another shape."""
    shapes: dict[str, dict[str, int]] = {
        "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
        "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    }
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
    head_dim = 16 if size == "tiny" else 64
    config = config_class(
        **shapes[size], num_key_value_heads=2, head_dim=head_dim, vocab_size=256, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with device:
        model = AutoModel.from_config(config, dtype=dtype)
        if size == "tiny":
            for number, layer in enumerate(model.layers):
                own = copy.deepcopy(model.config)
                own.num_attention_heads = 2 * (number + 1)
                model.layers[number] = type(layer)(own, number).to(dtype)
    return Decoder(model).eval()


class WeightReaders(TorchDispatchMode):
    """The truth: which weights the matmuls that are captured read, in order, found by their address."""

    def __init__(self, module: torch.nn.Module, is_capturing: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {
            parameter.untyped_storage().data_ptr(): name.rpartition(".")[0]
            for name, parameter in module.named_parameters()
            if parameter.dim() == 2
        }
        self._is_capturing = is_capturing
        self.modules: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in MATMULS and self._is_capturing():
            read = [t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)]
            self.modules += [self.names[address] for address in read if address in self.names]
        return func(*args, **(kwargs or {}))


def graph_records(tapes: list[Tape]) -> list[GraphRecord]:
    """What is inside all graphs of some tapes."""
    steps = [step for tape in tapes for step in tape.steps if isinstance(step, GraphStep)]
    assert all(step.inside is not None for step in steps)
    return [step.inside.record for step in steps if step.inside is not None]


def matmul_modules(records: list[GraphRecord], known: Collection[str]) -> Iterator[str]:
    """The modules that the matmuls of some graphs are said to come from, in order; those without weights left out."""
    for record in records:
        for call in record.calls:
            if call.op in MATMULS and call.origins[0].module in known:
                yield call.origins[0].module


def is_known(call: LaunchCall | None) -> bool:
    """Whether module and line of a call are known, of all its origins."""
    return (
        call is not None
        and bool(call.origins)
        and all(origin.module and origin.line is not None for origin in call.origins)
    )


def share_known(launches: list[Launch]) -> float:
    """The share of time that is attributed to a module and a line."""
    known = sum(launch.duration for launch in launches if is_known(launch.call))
    return known / sum(launch.duration for launch in launches)
