"""Saves the tensors that go into and come out of ops, by running a recorded size again without graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.call_stack import current_origin, stacks_from_here
from piecegraph.base.origin import Origin
from piecegraph.base.plan import Piece, SourceLine
from piecegraph.graph.program import Step, take, watched_steps
from piecegraph.provenance.observe import whole_step
from piecegraph.provenance.origins.fx import origins_of


def dump_calls(folder: Path, origins: Set[Origin], compute: Callable[[], Any]) -> list[Path]:
    """Run a computation and save the arguments and results of the ops that have one of the origins.

    Args:
        folder: made if it is not there; files in it are named by module and op.
        origins: places in the model.
        compute: runs the steps of a program, plainly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder, origins)

    def run_step(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> list[Any]:
        filled, filled_kwargs = take(args, values), take(kwargs, values)
        wanted = [origin for origin in whole_step(step).origins if writer.wants(origin)]
        if wanted and isinstance(step.label, Piece):
            returned = _Saver(step.source.module, writer).run(*filled)
        else:
            inputs = _copied((filled, filled_kwargs)) if wanted else None
            returned = step.function(*filled, **filled_kwargs)
            for origin in wanted:
                writer.write(origin, inputs, _copied(returned))
        return [returned if position is None else returned[position] for _, position in step.results]

    with watched_steps(run_step), stacks_from_here(), _OpSaver(writer):
        compute()
    return writer.paths


class _Writer:
    """Writes one file for each op that is asked for."""

    def __init__(self, folder: Path, origins: Set[Origin]) -> None:
        self._folder = folder
        self._places = set(map(_place, origins))
        self.paths: list[Path] = []

    def wants(self, origin: Origin) -> bool:
        return _place(origin) in self._places

    def write(self, origin: Origin, inputs: Any, outputs: Any) -> None:
        name = re.sub(r"[^\w.]+", "_", f"{origin.module or 'top'}-{origin.op}")
        path = self._folder / f"{len(self.paths):03}-{name}.pt"
        line = str(origin.line or "")
        torch.save({"op": origin.op, "module": origin.module, "line": line, "inputs": inputs, "outputs": outputs}, path)
        self.paths.append(path)


class _Saver(torch.fx.Interpreter):
    """Runs a piece or a cut as it was traced, and has the ops written that are asked for."""

    def __init__(self, module: torch.fx.GraphModule, writer: _Writer) -> None:
        super().__init__(module)
        self._writer = writer

    def run_node(self, n: torch.fx.Node) -> Any:
        origins = origins_of(n) if n.op in ("call_function", "call_method") else ()
        wanted = next(filter(self._writer.wants, origins), None)
        if wanted is None:
            return super().run_node(n)
        inputs = _copied(self.fetch_args_kwargs_from_env(n))  # before: the op may write to them
        outputs = super().run_node(n)
        self._writer.write(wanted, inputs, _copied(outputs))
        return outputs


class _OpSaver(torch_compat.WatchingMode):
    """The same for code that is not traced."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writer = writer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        op = torch_compat.qualified_name(func).partition(".")[0]
        origin = current_origin(op)
        if not self._writer.wants(origin):
            return func(*args, **(kwargs or {}))
        inputs = _copied((args, kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        self._writer.write(origin, inputs, _copied(outputs))
        return outputs


def _place(origin: Origin) -> tuple[str, str, SourceLine | None]:
    """An origin without the functions around it, which make no difference."""
    return origin.op, origin.module, origin.line


def _copied(value: Any) -> Any:
    """Arguments or results as they are now, in types that ``torch.load`` trusts; what it does not know is text."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {str(name): _copied(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_copied, value))
    return value if value is None or type(value) in (bool, int, float, complex, str, torch.dtype) else str(value)
