"""A graph and what goes into it in, one Python file that needs nothing but torch out.

The code of the graph stands first and does not move when more becomes known of its inputs, because a file that is
written while a model is compiled is also the one that its piece runs from.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from piecegraph.base import compare, torch_compat
from piecegraph.base.text import count_of
from piecegraph.base.version import VERSION
from piecegraph.dumps import standalone
from piecegraph.dumps.specs import InputSpec, SizeSpec, TensorSpec
from piecegraph.graph.fx_nodes import attribute, op_name, writes_in_place

_FEW_ELEMENTS = 256
"""A constant of no more is written into the file."""

_GIVEN = {
    "torch": "",
    "pytree": "",
    "fx_pytree": "",
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "from types import NoneType",
}
"""What the code of every graph may call; trees are not among it, because a piece takes and returns flat values."""

_EMPTY = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty"))

_plain_forms: dict[str, str] = {}
_MARK = "# --- from here on it is copied\n"
_OF_TORCH = frozenset("aten prims prim inductor quantized mkldnn _c10d_functional streams higher_order".split())


def register_plain_form(op: str, function: str) -> None:
    """Say what computes the same as an op of ours where piecegraph is not installed.

    Args:
        op: ``"ns::op"``.
        function: a name that is found from ``torch``, or a lambda that needs no more.
    """
    _plain_forms[op] = function


@dataclass(frozen=True)
class Repro:
    """A piece alone."""

    stem: str
    """The names of its files begin with it."""
    title: str
    """``piece 3 of Decoder``."""
    module: torch.fx.GraphModule
    specs: tuple[InputSpec, ...] | None
    """None if it cannot be run alone: then the file holds its code and no more."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's settings."""
    saved: str = ""
    """Holds the inputs, if they were saved."""
    failure: str = ""
    """What went wrong with it."""
    why_not: str = ""
    """Why it cannot be run alone."""

    @property
    def constants_file(self) -> str:
        """Holds the constants that are too large for the text."""
        return f"{self.stem}_constants.pt"


def why_not(module: torch.fx.GraphModule) -> str:
    """Why a graph cannot be run without the program it is from; empty if it can."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and not isinstance(attribute(module, node), torch.Tensor):
            return f"it holds a {type(attribute(module, node)).__name__} ({node.target})"
    return ""


def foreign_ops(module: torch.fx.GraphModule) -> dict[str, Any]:
    """The ops of a graph that torch does not have by itself, by name."""
    called = [node for node in module.graph.nodes if node.op == "call_function"]
    found = {op_name(node).partition(".")[0]: node.target for node in called}
    return {name: op for name, op in found.items() if "::" in name and name.partition("::")[0] not in _OF_TORCH}


def large_constants(module: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """Constants that are kept beside the file."""
    return {name: value for name, value in _constants(module).items() if value.numel() > _FEW_ELEMENTS}


def write_repro(repro: Repro) -> tuple[str, Mapping[str, Any]]:
    """The text, and the names that the code of the graph uses."""
    code = torch_compat.graph_code(repro.module.graph)
    head = [f'"""{_headline(repro)}', _usage(repro), '"""', "", "from __future__ import annotations", ""]
    head += [*_imports(code), *_registrations(repro.module), "", "", "class Piece(torch.nn.Module):"]
    body = [f"    {line}" if line.strip() else "" for line in code.text.rstrip().splitlines()]
    parts = ["\n".join([*head, *body])]
    if repro.specs is not None:
        parts += [_constructor(repro), inputs_text(repro.specs), _copied_code(), _ending(repro, repro.specs)]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n", code.names


def _headline(repro: Repro) -> str:
    ops = sum(node.op.startswith("call_") for node in repro.module.graph.nodes)
    return f"{repro.title}: {count_of(ops, 'op')}. Written by piecegraph {VERSION} with torch {torch.__version__}."


def _usage(repro: Repro) -> str:
    if repro.specs is None:
        return f"\nIt cannot be run alone: {repro.why_not}\n"
    foreign = [name for name in foreign_ops(repro.module) if name not in _plain_forms]
    needs = f"It needs torch, and whatever registers {', '.join(foreign)}." if foreign else "It needs torch alone."
    return f"""
{needs}

    python {repro.stem}.py             runs it once
    python {repro.stem}.py --check     eager, compiled and, on a GPU, captured: the exit code is 1 if they differ
    python {repro.stem}.py --size N    at another size
"""


def _imports(code: torch_compat.GraphCode) -> list[str]:
    """The imports of what a graph's code and the copied code call."""
    lines = ["import argparse", "from collections.abc import Callable, Sequence", "from pathlib import Path"]
    lines += ["from typing import Any", "", "import torch", ""]
    return lines + [line for name, value in code.names.items() if (line := _import(name, value))]


def _import(name: str, value: Any) -> str:
    if name in _GIVEN:
        return _GIVEN[name]
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    home, own_name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if home and own_name and "." not in own_name and "<" not in own_name:
        return f"from {home} import {own_name} as {name}"
    return f"{name} = None  # not to be found by name: {value!r}".replace("\n", " ")


def _registrations(module: torch.fx.GraphModule) -> list[str]:
    """Ops of piecegraph's have a plain form that the file registers itself; of others, it imports their home."""
    lines: list[str] = []
    for name, op in foreign_ops(module).items():
        space, _, own_name = name.partition("::")
        if name in _plain_forms:
            library, schema = f'torch.library.Library("{space}", "FRAGMENT")', torch_compat.schema_of(op)
            lines += ["", f"library = {library}", f'library.define("{schema}")']
            lines.append(f'library.impl("{own_name}", {_plain_forms[name]}, "CompositeImplicitAutograd")')
        else:
            home = torch_compat.home_of_op(op)
            lines += ["", f"import {home}  # registers {name}" if home else f"# {name} must be registered here"]
    return lines


def _constants(module: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    found = {node.target: attribute(module, node) for node in module.graph.nodes if node.op == "get_attr"}
    return {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _constructor(repro: Repro) -> str:
    lines = ["def make_piece() -> torch.nn.Module:", "    piece = Piece()"]
    large = large_constants(repro.module)
    if large:
        lines.append(f"    constants = torch.load(Path(__file__).parent / {repro.constants_file!r})")
    for name, value in _constants(repro.module).items():
        made = f"constants[{name!r}]" if name in large else _literal(value)
        lines.append(f"    piece.register_buffer({name!r}, {made})")
    return "\n".join([*lines, "    return piece"])


def _literal(value: torch.Tensor) -> str:
    return f"torch.tensor({value.detach().cpu().tolist()!r}, dtype={value.dtype})"


def inputs_text(specs: Sequence[InputSpec]) -> str:
    """The function that makes the inputs, given a ``Maker``."""
    sizes = [spec.name for spec in specs if isinstance(spec, SizeSpec)]
    lines = ["def make_inputs(maker: Maker, sizes: Sequence[int]) -> list[Any]:"]
    if sizes:
        lines.append(f"    ({', '.join(sizes)},) = sizes")
    return "\n".join([*lines, "    return [", *(f"        {_made(spec)},{_comment(spec)}" for spec in specs), "    ]"])


def _made(spec: InputSpec) -> str:
    if isinstance(spec, SizeSpec):
        return spec.name
    shape, stride = (f"({', '.join(parts)}{',' * (len(parts) == 1)})" for parts in (spec.shape, spec.stride))
    low, high = _bounds(spec)
    return f"maker.tensor({shape}, {stride}, {spec.dtype}, {low!r}, {high!r})"


def _comment(spec: InputSpec) -> str:
    return f"  # {spec.origin}" if spec.origin else ""


def _bounds(spec: TensorSpec) -> tuple[float, float]:
    """Where nothing was seen: numbers around zero, and indices that are always valid."""
    if spec.low is not None and spec.high is not None:
        return spec.low, spec.high
    return (-1.0, 1.0) if spec.dtype.is_floating_point or spec.dtype.is_complex else (0, 1)


def _unwritten(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """The results that are memory nobody has written to: that of an op which comes later, and writes to an argument."""
    empty, written = set(), set()
    for node in module.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        if op_name(node).partition(".")[0] in _EMPTY:
            empty |= _storages([node])
        elif writes_in_place(node):
            written |= _storages(node.all_input_nodes)
    (results,) = module.graph.output_node().args
    return tuple(i for i, node in enumerate(results) if _storages([node]) & (empty - written))  # type: ignore[arg-type]


def _storages(nodes: Sequence[torch.fx.Node]) -> set[int]:
    values = [torch_compat.meta_value(node) for node in nodes if isinstance(node, torch.fx.Node)]
    return {torch_compat.storage_id(value) for value in values if isinstance(value, torch.Tensor)}


@functools.cache
def _copied_code() -> str:
    """What every repro has: see ``standalone.py``."""
    shared = inspect.getsource(standalone).partition(_MARK)[2]
    tolerance = f"TOLERANCE = {{{', '.join(f'{dtype}: {limit}' for dtype, limit in compare.TOLERANCE.items())}}}"
    return "\n\n\n".join([tolerance, inspect.getsource(compare.difference).strip(), shared.strip()])


def _ending(repro: Repro, specs: Sequence[InputSpec]) -> str:
    where = next((spec.device for spec in specs if isinstance(spec, TensorSpec)), "cpu")
    sizes = tuple(spec.value for spec in specs if isinstance(spec, SizeSpec))
    arguments = [
        f"sizes={sizes!r}",
        f"where={where!r}",
        f"options={dict(repro.options)!r}",
        f"unwritten={_unwritten(repro.module)!r}",
        f"saved={repro.saved!r}",
        f"failure={repro.failure!r}",
    ]
    given = "".join(f"            {each},\n" for each in ("make_piece", "make_inputs", *arguments))
    return f'if __name__ == "__main__":\n    raise SystemExit(\n        main(\n{given}        )\n    )'
