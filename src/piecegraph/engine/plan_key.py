"""What a plan depends on, as far as that can be seen before anything is traced: the factors of its key.

What can be seen only afterwards (the functions that are called, the values that are read outside the call) is written
down with the trace and looked at when it is loaded: ``graph/kept_trace.py``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import Options
from piecegraph.base.describe import Describer, describe_tensor, digest, module_state
from piecegraph.base.entries import Factors
from piecegraph.base.environment import installed_version
from piecegraph.base.torch_functions import describe_functions
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.example import Example
from piecegraph.graph.signature import TensorLeaf


def plan_factors(
    function: Callable[..., Any], example: Example, weights: Mapping[str, torch.Tensor], how: Mapping[str, str]
) -> Factors:
    """The factors of a function's plan. Raises IndescribableError.

    Args:
        function: what is traced.
        example: a call.
        weights: its parameters and buffers.
        how: what is asked of the stages, described.
    """
    describer = Describer()
    roots = dict(_modules_of(function))
    for prefix, root in roots.items():
        for path, module in root.named_modules():
            describer.know(module, f"module {_join(prefix, path)}")
            installed = vars(module).get("forward")
            if type(installed).__module__.startswith("piecegraph."):  # where install() has put us
                describer.know(installed, "a plan")
    state = {
        _join(prefix, path, name): text
        for prefix, root in roots.items()
        for path, module in root.named_modules()
        for name, text in _state_of(module, describer)
    }
    described = describer.text(function, "the function")
    devices = {t.device for t in (*example.tensors, *weights.values())} or {torch.device("cpu")}
    return {
        "function": {"name": getattr(function, "__qualname__", type(function).__name__), "code": described},
        "classes": dict(sorted(describer.classes.items())),
        "configuration": state,
        "weights": dict(_weights(weights)),
        "call": dict(_call(example, describer)),
        "options": dict(how),
        "settings": torch_compat.compiler_settings(),
        "versions": dict(_versions()),
        "device": dict(_devices(devices)),
    }


def pipeline_factors(
    backend: Any, passes: Iterable[Any], rules: CutRules, options: Options, *, is_full: bool, provenance: bool
) -> dict[str, str]:
    """What is asked of the stages: what they are told, and nothing of what happens at a call."""
    describer = Describer()
    found = {
        "backend": describer.text(backend, "the backend"),
        "passes": describer.text(list(passes), "a pass"),
        "splitting_ops": describer.text(rules.asked_for, "splitting_ops"),
        "full": str(is_full),
        "fuse_linears": str(options.fuse_linears),
        "provenance": str(provenance),
    }
    return found | {f"inductor.{name}": describer.text(value, name) for name, value in options.inductor.items()}


def key_of(factors: Factors) -> str:
    """A name for the entry."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:24]


def _modules_of(function: Callable[..., Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a function belongs to or closes over, with what their paths begin with."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        yield "", owner
    plain = getattr(function, "__func__", function)
    names = plain.__code__.co_freevars if hasattr(plain, "__code__") else ()
    for name, cell in zip(names, getattr(plain, "__closure__", None) or (), strict=False):
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(held, torch.nn.Module):
            yield name, held


def _state_of(module: torch.nn.Module, describer: Describer) -> Iterator[tuple[str, str]]:
    yield "", describer.text(type(module))
    for name, value in module_state(module):
        yield name, describer.text(value, name)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _weights(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Of each, its layout; of one that is another, or lies in its memory, that one's name."""
    tensors: dict[int, str] = {}
    storages: dict[int, str] = {}
    for name, tensor in weights.items():
        if id(tensor) in tensors:
            yield name, f"the same as {tensors[id(tensor)]}"
            continue
        tensors[id(tensor)], text = name, describe_tensor(tensor)
        if torch_compat.has_memory(tensor):
            first = storages.setdefault(torch_compat.storage_id(tensor), name)
            text += f" in the memory of {first}" if first != name else ""
        yield name, text


def _call(example: Example, describer: Describer) -> Iterator[tuple[str, str]]:
    """What the call looks like, but for the sizes that may vary."""
    signature = example.signature
    yield "training", str(signature.training)
    yield "dims", str([(r.leaf, r.dim, r.group, r.is_explicit) for r in example.requests])
    for name, argument in zip(signature.names, signature.arguments, strict=True):
        structure, leaves = argument if isinstance(argument, tuple) else ("", (argument,))
        if structure:
            yield name, describer.text(structure, name)
        for leaf in leaves:
            if isinstance(leaf, TensorLeaf):
                moving = {dim for dim, _ in leaf.dynamic}
                shape = ["*" if dim in moving else size for dim, size in enumerate(leaf.shape)]
                static = f" static {leaf.strides}" if leaf.address is not None else ""
                yield leaf.name, f"{leaf.dtype} {shape} {leaf.device} order {leaf.dim_order}{static}"
            else:
                yield leaf.name, describer.text(leaf.value, leaf.name)


def _versions() -> Iterator[tuple[str, str]]:
    yield "piecegraph", _own_source()
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__} {torch.version.git_version}"
    yield "functions of torch", describe_functions()
    for package in ("triton", "transformers"):
        yield package, _installed(package)


@functools.cache
def _installed(package: str) -> str:
    return installed_version(package) or "not installed"


@functools.cache
def _own_source() -> str:
    """A hash of all our own files, in place of a version that somebody at work on them does not raise."""
    folder = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _devices(devices: Iterable[torch.device]) -> Iterator[tuple[str, str]]:
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            shown = f"{found.name} sm_{found.major}{found.minor} {found.multi_processor_count} multiprocessors"
            yield str(device), f"{shown}, CUDA {torch.version.cuda}"
        elif device.type == "cpu":
            yield "cpu", _processor()
            yield "threads", str(torch.get_num_threads())
        else:
            yield str(device), device.type


@functools.cache
def _processor() -> str:
    """The machine's instruction set: Inductor compiles for this one and no other."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {digest(flags)}"
