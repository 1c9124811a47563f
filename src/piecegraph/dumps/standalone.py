"""What every repro holds a copy of: makes the inputs of a piece and compares the ways to run it.

Nothing of piecegraph may be used here but ``base/compare.py``, which is copied, too: a repro runs where there is
nothing but torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from piecegraph.base.compare import difference

# --- from here on it is copied


class Maker:
    """Makes inputs: the same ones whenever it starts anew."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._generator = torch.Generator().manual_seed(0)

    def tensor(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, low: float, high: float
    ) -> torch.Tensor:
        """A tensor that lies in memory as asked for, with values from ``low`` to ``high``, both included."""
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        numel = last + 1 if all(shape) else 0
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
            flat = torch.rand(numel, generator=self._generator, dtype=wide) * (high - low) + low
        else:
            flat = torch.randint(int(low), int(high) + 1, (numel,), generator=self._generator)
        return flat.to(dtype).to(self.where).as_strided(tuple(shape), tuple(stride))


def captured(run: Callable[..., Any], make_inputs: Callable[[], list[Any]]) -> list[Any]:
    """The results of a replay of one CUDA graph, and what it left in the inputs."""
    inputs, graph, side = make_inputs(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # kernels are loaded, workspaces made
        run(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = run(*inputs)
    for mine, fresh in zip(inputs, make_inputs(), strict=True):
        if isinstance(mine, torch.Tensor):  # by storage, since elements may overlap
            mine.untyped_storage().copy_(fresh.untyped_storage())
    graph.replay()
    torch.cuda.synchronize()
    return [*results, *inputs]


def called(run: Callable[..., Any], make_inputs: Callable[[], list[Any]]) -> list[Any]:
    """The results of one call, and what it left in the inputs."""
    torch.manual_seed(0)
    inputs = make_inputs()
    return [*run(*inputs), *inputs]


def show(value: Any) -> str:
    """A result in one line."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def check(
    piece: torch.nn.Module,
    make_inputs: Callable[[], list[Any]],
    where: str,
    options: dict[str, Any],
    unwritten: Sequence[int],
) -> int:
    """Run a piece eagerly, compiled and, on a GPU, captured; 1 if one differs from the first, or fails."""
    expected = called(piece, make_inputs)
    skipped = f"; {len(unwritten)} not compared, because nothing is in it yet" if unwritten else ""
    print(f"eager     {len(expected)} results and inputs{skipped}")
    compiled = torch.compile(piece, fullgraph=True, dynamic=True, options=options)
    ways: dict[str, Callable[[], list[Any]]] = {"compiled": lambda: called(compiled, make_inputs)}
    if where.startswith("cuda"):
        ways["captured"] = lambda: captured(compiled, make_inputs)
    num_wrong = 0
    for name, run in ways.items():
        try:
            found = run()
            pairs = enumerate(zip(found, expected, strict=True))
            texts = {index: difference(*pair) for index, pair in pairs if index not in unwritten}
            wrong = [f"{text} at {index}" for index, text in texts.items() if text]
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and that is the answer
            wrong = [f"{type(error).__name__}: {error}"]
        print(f"{name:<9} {'; '.join(wrong) or 'the same'}")
        num_wrong += bool(wrong)
    return min(num_wrong, 1)


def main(
    make_piece: Callable[[], torch.nn.Module],
    make_inputs: Callable[[Maker, Sequence[int]], list[Any]],
    *,
    sizes: Sequence[int],
    where: str,
    options: dict[str, Any],
    unwritten: Sequence[int],
    saved: str,
    failure: str,
) -> int:
    """The command. Returns its exit code: 0, or 1 if the ways to run the piece differ."""
    parser = argparse.ArgumentParser(description="A piece of a model, alone.")
    parser.add_argument("--check", action="store_true", help="compare eager, compiled and captured")
    if sizes:
        parser.add_argument("--size", type=int, nargs=len(sizes), help=f"default: {' '.join(map(str, sizes))}")
    parser.add_argument("--device", default=where if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    given = parser.parse_args()
    asked = getattr(given, "size", None)
    if failure:
        print(f"when it was written: {failure}\n")

    def make() -> list[Any]:
        if saved and asked is None:
            tensors = torch.load(Path(__file__).parent / saved, map_location=given.device)
            return [each.clone() if isinstance(each, torch.Tensor) else each for each in tensors]
        return make_inputs(Maker(given.device), asked or sizes)

    with torch.no_grad():
        piece = make_piece().to(given.device)
        if given.check:
            return check(piece, make, given.device, options, unwritten)
        for result in piece(*make()):
            print(show(result))
    return 0
