"""What runs in a process that compiles pieces for another: see Note [Pieces compiled aside]."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.kept_graph import KeptNode, UnkeepableError, dump, keep_nodes, load, make_graph
from piecegraph.graph.sizes import SizeGuards

READY = b"ready"
END = b"."
_INPUT = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece, and all that decides what is made of it."""

    symbols: tuple[torch_compat.KeptSymbol, ...]
    nodes: tuple[KeptNode, ...]
    settings: Mapping[str, Any]
    """Of Inductor."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a piece."""

    artifact: str | None
    """What Inductor finds it by; None if it was not compiled."""
    guards: SizeGuards = ()
    """What compiling it relied on."""
    reason: str = ""
    """Why it was not compiled."""


def make_job(module: torch.fx.GraphModule, fake_mode: Any, settings: Mapping[str, Any]) -> bytes | None:
    """A piece on its way to another process; None if it cannot be sent."""
    graph = module.graph
    if any(graph.find_nodes(op="get_attr")):  # numbers, which would have to be sent, too
        return None
    homes = torch_compat.modules_of_ops(node.target for node in graph.nodes if node.op == "call_function")
    modules = [name for name in homes if name.startswith("piecegraph.")]  # who knows what importing others does
    try:
        job = dump(_Job(torch_compat.kept_symbols(fake_mode), keep_nodes(graph), dict(settings)))
    except (UnkeepableError, pickle.PicklingError, TypeError, AttributeError):
        return None
    places, precision = torch_compat.compiler_places(), torch.get_float32_matmul_precision()
    return pickle.dumps((modules, places, precision, torch_compat.compiler_settings(), job))


def compile_job(data: bytes) -> Done:
    """Compile a piece that :func:`make_job` sent. Never raises: whoever sent it compiles it then, and tells why."""
    try:
        modules, places, precision, expected, job = pickle.loads(data)
        for name in modules:
            importlib.import_module(name)
        torch_compat.use_compiler_places(places)
        torch.set_float32_matmul_precision(precision)
        found = torch_compat.compiler_settings()
        if found != expected:
            changed = sorted(name for name, _ in found.items() ^ expected.items())
            return Done(None, reason=f"settings of torch differ: {', '.join(dict.fromkeys(changed))}")
        return _compile(load(job))
    except Exception as error:  # noqa: BLE001 - see above
        return Done(None, reason=f"{type(error).__name__}: {error}")


def _compile(job: _Job) -> Done:
    world = torch_compat.FakeWorld(job.symbols)
    module = torch.fx.GraphModule(torch.nn.Module(), make_graph(job.nodes, world)[0])
    fakes = torch_compat.input_values(module)
    made = torch_compat.inductor_compile(module, fakes, world.mode, job.settings)
    return Done(
        made.artifact, torch_compat.size_guards(world.mode), "" if made.artifact else "Inductor does not keep it"
    )


def main(handles: Sequence[int], modules: Sequence[str], device: str) -> None:
    """Have a copy of this process serve each connection until it is closed, or this process is to end.

    Copies are made when all is imported, and before anything has asked for a GPU: each of them may do so then.

    Args:
        handles: the connections.
        modules: what else is needed.
        device: what is compiled for.
    """
    torch_compat.import_inductor()
    for name in modules:
        importlib.import_module(name)
    torch_compat.wait_for_hashes()
    copies = [_fork(handle, handles, device) for handle in handles]
    for handle in handles:
        os.close(handle)
    os.read(_INPUT, 1)  # a word from whoever asked for this, or the end of it
    _end(copies)
    os._exit(0)  # to take apart what was imported would take longer


def _fork(handle: int, handles: Sequence[int], device: str) -> int:
    process = os.fork()
    if process:
        return process
    for other in (_INPUT, *handles):
        if other != handle:
            os.close(other)
    try:
        # The first graph takes seconds more than others. Until then pieces are compiled sooner where they come from.
        torch_compat.warm_up_inductor(torch.device(device))
        _serve(Connection(handle))
    finally:
        os._exit(0)


def _serve(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):  # nobody listens any more
        connection.send_bytes(READY)
        while True:
            connection.send_bytes(pickle.dumps(compile_job(connection.recv_bytes())))


def _end(copies: Iterable[int]) -> None:
    """When this returns, what they had of a GPU is free."""
    for copy in copies:
        with contextlib.suppress(ProcessLookupError):
            os.kill(copy, signal.SIGKILL)
    for copy in copies:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(copy, 0)
