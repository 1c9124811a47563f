"""The files of one distinct piece: its code, which it also runs from, its repro, and what is left of a failure."""

from __future__ import annotations

import ast
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.dumps.folder import DumpFolder
from piecegraph.dumps.index import DumpedPiece
from piecegraph.dumps.repro import Repro, inputs_text, large_constants, why_not, write_repro
from piecegraph.dumps.smallest import Part, part_of, run_as_traced, smallest_failing, units_of
from piecegraph.dumps.specs import InputSpec, TensorSpec, specs_of, with_origins, with_values
from piecegraph.dumps.standalone import Maker
from piecegraph.graph.compile import CompilePiece
from piecegraph.graph.fx_nodes import op_name, source_line, writes_in_place

_MAX_FAILURE = 1500
"""Characters of an error that are kept."""


class PieceFiles:
    """What is written of a piece, as more becomes known of it.

    Args:
        folder: of the plan.
        title: of the piece.
        index: of the step.
        module: its graph.
        origins: where its inputs come from, in words.
        settings: Inductor's.
        compile_piece: compiles parts of it as it is compiled.
    """

    def __init__(
        self,
        folder: DumpFolder,
        title: str,
        index: int,
        module: torch.fx.GraphModule,
        origins: Sequence[str],
        settings: Mapping[str, Any],
        compile_piece: CompilePiece,
    ) -> None:
        self._folder = folder
        self._stem = f"piece_{index:02}"
        self._title = title
        self._module = module
        self._compile = compile_piece
        self._settings = {key: value for key, value in settings.items() if _is_literal(value)}
        found = specs_of(module)
        self._specs = None if isinstance(found, str) else with_origins(found, origins)
        reason = why_not(module) or (found if isinstance(found, str) else "")
        constants = large_constants(module)
        if constants and folder.save(f"{self._stem}_constants.pt", constants) is None:
            reason = reason or "its constants could not be saved"
        self._why_not = f"no repro: {reason}" if reason else ""
        self._started = time.perf_counter()
        self.entry = DumpedPiece(index, why_no_repro=self._why_not, input_bytes=_num_bytes(self._specs or ()))
        self._write_code()

    # -- it is compiled

    def _write_code(self) -> None:
        """Write the file and let the graph run from it."""
        text, names = self._text()
        path = self._folder.write(f"{self._stem}.py", text)
        if path is not None:
            torch_compat.run_from_file(self._module, str(path), text, names)
            self.entry = replace(self.entry, repro=path.name)

    def _text(self) -> tuple[str, Mapping[str, Any]]:
        return write_repro(
            Repro(
                self._stem,
                self._title,
                self._module,
                None if self._why_not else self._specs,
                options=self._settings,
                saved=self.entry.inputs,
                failure=self.entry.failure,
                why_not=self._why_not,
            )
        )

    def place(self, source: str) -> str | None:
        """Put the code that Inductor generated into a file, from which it is run."""
        path = self._folder.write(f"{self._stem}_inductor.py", source)
        if path is None:
            return None
        self.entry = replace(self.entry, wrapper=path.name)
        return str(path)

    def compiled(self) -> None:
        """It was compiled, or runs as it was traced."""
        self.entry = replace(self.entry, seconds=time.perf_counter() - self._started)

    def compile_failed(self, error: Exception) -> None:
        """It cannot be compiled: look for the smallest part of it that cannot be either."""

        def fails(part: Part) -> bool:
            try:
                self._compile(part.module)
            except Exception as found:  # noqa: BLE001 - a compiler may raise anything
                return type(found) is type(error)
            return False

        part = smallest_failing(self._module, fails)
        where = "" if part is None else f" (of its ops, {_ops_in_words(part)} will do)"
        self._write_failure(f"{type(error).__name__}{where}: {str(error).strip()}")
        if part is not None:
            self._write_smallest(part, specs_of(part.module))

    # -- it runs

    def note_inputs(self, inputs: Sequence[Any], *, saves: bool) -> None:
        """It is about to run for the first time: now it is known what goes into it."""
        if self._specs is None or self._why_not:
            return
        try:
            self._specs = with_values(self._specs, inputs)
        except torch.OutOfMemoryError:  # the ranges of values are a courtesy
            return
        self.entry = replace(self.entry, input_bytes=_num_bytes(self._specs))
        if saves:
            self._save_inputs(inputs)
        self._folder.write(f"{self._stem}.py", self._text()[0])

    def _save_inputs(self, inputs: Sequence[Any]) -> None:
        path = self._folder.save(f"{self._stem}_inputs.pt", _saveable(inputs))
        if path is not None:
            self.entry = replace(self.entry, inputs=path.name)

    def run_failed(self, error: Exception, inputs: Sequence[Any]) -> None:
        """It raised: find the op, by its line or by running the graph op by op, and write down that op alone."""
        if self.entry.failure:
            return
        node = self._node_of(error)
        values: Mapping[torch.fx.Node, Any] = {}
        if not _spoils_device(error):
            node, values = self._run_again(inputs, node)
            self.note_inputs(inputs, saves=False)
        if node is not None:
            part: Part | None = part_of(self._module, self._unit_of(node))
        else:
            part = smallest_failing(self._module, partial(self._does_compiled_fail, values, type(error)))
        line = f" ({source_line(node)})" if node is not None and source_line(node) else ""
        where = "" if part is None else f" at {_ops_in_words(part)}{line}"
        self._write_failure(f"{type(error).__name__}{where}: {str(error).strip()}")
        if part is not None:
            self._write_failing_part(part, values, is_eager=node is not None)

    def _does_compiled_fail(self, values: Mapping[torch.fx.Node, Any], kind: type[Exception], part: Part) -> bool:
        """Whether a part that runs as it was traced fails when it is compiled."""
        if not values:
            return False
        try:
            self._compile(part.module)(*(values[each] for each in part.inputs))
        except Exception as error:  # noqa: BLE001 - it is run to see what it raises
            return type(error) is kind
        return False

    def _unit_of(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        return next((unit for unit in units_of(self._module) if node in unit), (node,))

    def _write_failing_part(self, part: Part, values: Mapping[torch.fx.Node, Any], *, is_eager: bool) -> None:
        """With the values that it failed on, if values like them do not do."""
        specs = specs_of(part.module)
        if isinstance(specs, str) or not all(each in values for each in part.inputs):
            self._write_smallest(part, specs)
            return
        given = [values[each] for each in part.inputs]
        made = with_values(specs, given)
        needs_values = is_eager and not _does_fail(part, made)
        self._write_smallest(part, made, given if needs_values else None)

    def capture_failed(self, reason: str, can_capture: Callable[[Callable[..., Any], tuple[Any, ...]], bool]) -> None:
        """It runs, but not inside of a graph: look for the smallest part of it that does not either."""
        if self.entry.smallest or self._specs is None or self._why_not:
            return
        _, values = run_as_traced(self._module, _made_inputs(self._specs))

        def fails(part: Part) -> bool:
            return not can_capture(part.module.forward, tuple(values[each] for each in part.inputs))

        part = smallest_failing(self._module, fails)
        where = "" if part is None else f" (of its ops, {_ops_in_words(part)} will do)"
        self._write_failure(self.entry.failure or f"it cannot be captured{where}: {reason}")
        if part is not None:
            found = specs_of(part.module)
            specs = found if isinstance(found, str) else with_values(found, [values[each] for each in part.inputs])
            self._write_smallest(part, specs)

    def _run_again(
        self, inputs: Sequence[Any], node: torch.fx.Node | None
    ) -> tuple[torch.fx.Node | None, Mapping[torch.fx.Node, Any]]:
        writes = any(writes_in_place(each) for each in self._module.graph.nodes if each.op.startswith("call_"))
        given = [each.clone() if writes and isinstance(each, torch.Tensor) else each for each in inputs]
        with torch_compat.without_trace(each.device for each in inputs if isinstance(each, torch.Tensor)):
            failed, values = run_as_traced(self._module, given)
        return failed or node, values

    def _node_of(self, error: Exception) -> torch.fx.Node | None:
        """The op whose line of the piece's file was running."""
        lines = torch_compat.nodes_by_line(self._module)
        file = torch_compat.forward_of(self._module).__code__.co_filename
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == file:
                return lines.get(line)
        return None

    def _write_failure(self, text: str) -> None:
        self.entry = replace(self.entry, failure=text[:_MAX_FAILURE])
        self._folder.write(f"{self._stem}.py", self._text()[0])

    def _write_smallest(
        self, part: Part, specs: tuple[InputSpec, ...] | str, given: Sequence[Any] | None = None
    ) -> None:
        if isinstance(specs, str) or part.num_ops >= len(units_of(self._module)):
            return
        stem = f"{self._stem}_smallest"
        saved = self._folder.save(f"{stem}_inputs.pt", _saveable(given)) if given is not None else None
        constants = large_constants(part.module)
        if constants:
            self._folder.save(f"{stem}_constants.pt", constants)
        repro = Repro(
            stem,
            f"The smallest part of {self._title.lower()} that fails",
            part.module,
            specs,
            options=self._settings,
            saved=saved.name if saved else "",
            failure=self.entry.failure,
        )
        path = self._folder.write(f"{stem}.py", write_repro(repro)[0])
        if path is not None:
            self.entry = replace(self.entry, smallest=path.name)


def _made_inputs(specs: Sequence[InputSpec]) -> list[Any]:
    """The inputs that a repro makes: by its own text."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"from __future__ import annotations\n{inputs_text(specs)}", scope)
    where = next((spec.device for spec in specs if isinstance(spec, TensorSpec)), "cpu")
    sizes = [spec.value for spec in specs if not isinstance(spec, TensorSpec)]
    made: list[Any] = scope["make_inputs"](Maker(where), sizes)
    return made


def _does_fail(part: Part, specs: Sequence[InputSpec]) -> bool:
    """Whether inputs that are made anew show the failure, too."""
    try:
        with torch.no_grad():
            part.module(*_made_inputs(specs))
    except Exception:  # noqa: BLE001 - it is run to see whether it raises
        return True
    return False


def _ops_in_words(part: Part) -> str:
    names = [op_name(node) for unit in units_of(part.module) for node in unit[:1]]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _num_bytes(specs: Sequence[InputSpec]) -> int:
    return sum(spec.num_bytes for spec in specs if isinstance(spec, TensorSpec))


def _saveable(inputs: Sequence[Any]) -> list[Any]:
    return [each.detach().cpu() if isinstance(each, torch.Tensor) else each for each in inputs]


def _spoils_device(error: Exception) -> bool:
    """Whether nothing can be run behind an error, or memory is what it lacked."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error)


def _is_literal(value: Any) -> bool:
    """Whether a setting can be written into a program."""
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return False
    return True
