"""Any module as a subject: made by a function that the user names, run through :func:`piecegraph.compile`."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piecegraph import api
from piecegraph.base.compare import first_difference
from piecegraph.base.structure import flatten
from piecegraph.bench.config import COMPILE_MODES, BenchConfig, Cell
from piecegraph.bench.result import Fallback, Mode, Phase, Verdict
from piecegraph.bench.runner import Counts, UnavailableError
from piecegraph.bench.timing import seconds_of, wait
from piecegraph.errors import ConfigError

MakeInputs = Callable[[int, int], Mapping[str, Any]]

_HOW: dict[Mode, dict[str, Any]] = {
    "breakable": {"frontend": "breakable"},
    "piecewise": {"cudagraph_mode": "piecewise"},
    "full": {"cudagraph_mode": "full"},
}


class AnyModule:
    """What ``pkg.mod:factory`` returns: a module, and a function that makes its inputs for a batch size and a length.

    Example:
        def factory():
            def inputs(batch_size, input_len):
                return {"x": torch.randn(batch_size, input_len, 64)}

            return torch.nn.Linear(64, 64), inputs
    """

    phases: tuple[Phase, ...] = ("forward",)

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        start = time.perf_counter()
        torch.manual_seed(0)
        module, self._make_inputs = _make(config.model)
        self._module: torch.nn.Module | None = module.to(config.device).eval().requires_grad_(False)
        self._load_s = time.perf_counter() - start
        self._weight_bytes = sum(parameter.nbytes for parameter in module.parameters())

    @property
    def groups(self) -> tuple[tuple[Mode, ...], ...]:
        return (self._config.modes,)  # they share one module

    def open(self, mode: Mode) -> ModuleRunner:
        assert self._module is not None, "it is not closed yet"
        reason = self._config.why_not(mode)
        if reason:
            raise UnavailableError(reason)
        return ModuleRunner(mode, self._module, self._load_s, self._config)

    def inputs(self, cell: Cell, number: int) -> dict[str, Any]:
        torch.manual_seed(number)
        made = self._make_inputs(cell.batch_size, cell.input_len)
        device = self._config.device
        return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in made.items()}

    def judge(self, runner: ModuleRunner, cell: Cell) -> Mapping[Phase, Verdict]:
        if runner.mode == "eager":
            return {"forward": Verdict(state="reference", reason=runner.ran_as)}
        assert self._module is not None, "it is not closed yet"
        inputs = self.inputs(cell, 0)
        with torch.inference_mode():
            expected = flatten(self._module(**inputs))[0]
        found = flatten(runner.call(inputs))[0]
        difference = first_difference(found, expected)
        if difference is not None:
            return {"forward": Verdict(state="differs", reason=difference)}
        return {"forward": Verdict(state="same", reason="within the tolerance of its precision")}

    def num_tokens(self, cell: Cell, phase: Phase) -> int:
        return cell.batch_size

    def read_bytes(self, cell: Cell, phase: Phase) -> int:
        return self._weight_bytes

    def close(self) -> None:
        self._module = None


class ModuleRunner:
    """One mode of a module."""

    def __init__(self, mode: Mode, module: torch.nn.Module, load_s: float, config: BenchConfig) -> None:
        self.mode = mode
        self._has_graphs = config.has_graphs
        self.weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
        self._run: Any = module
        self._ours: Any = None
        self.ran_as = "the module itself"
        if mode in COMPILE_MODES:
            self._run = torch.compile(module, mode=COMPILE_MODES[mode])
            self.ran_as = f"torch.compile, mode={COMPILE_MODES[mode]}"
        elif mode in _HOW:
            options = {"progress": False, "graph_device": config.graph_device}
            self._run = self._ours = api.compile(module, **_HOW[mode], options=options, on_fallback="ignore")
            self.ran_as = mode if config.has_graphs else f"direct: {mode}, no graphs on a CPU"
        self.stages_s = {"load": load_s}

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Run it once; what making it ready takes is part of its start."""
        start = time.perf_counter()
        with torch.inference_mode():
            found = self._run(**inputs)
        if self._ours is not None:
            self.stages_s = {"load": self.stages_s["load"], **_plan_seconds(self._ours)}
        elif self.mode != "eager":
            wait()
            self.stages_s["compile"] = self.stages_s.get("compile", 0.0) + time.perf_counter() - start
        return found

    def sample_s(self, phase: Phase, inputs: Mapping[str, Any]) -> float:
        with torch.inference_mode():
            return seconds_of(lambda: self._run(**inputs))

    def counts(self, phase: Phase) -> Counts:
        if self._ours is None:
            return Counts()
        stats = self._ours.stats()
        # Without graphs a plan's calls are counted as replayed, too.
        return Counts(num_steps=stats["calls"], num_replays=stats["replayed"] if self._has_graphs else 0)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return () if self._ours is None else tuple(Fallback(**loss) for loss in self._ours.stats()["losses"])

    def close(self) -> None:
        if self._ours is not None:
            self._ours.close()
        self._run = self._ours = None


def _plan_seconds(compiled: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for plan in compiled.stats()["plans"]:
        for stage, seconds in plan["seconds"].items():
            found[stage] = found.get(stage, 0.0) + seconds
    return found


def _make(name: str) -> tuple[torch.nn.Module, MakeInputs]:
    """Call a factory by its name."""
    home, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for python -m
    try:
        factory = getattr(importlib.import_module(home), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "write pkg.mod:factory, with pkg in this folder or installed"
        raise ConfigError("PG101", f"--module is {name!r}", why=str(error), hint=hint) from error
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        why = f"its factory returned a {type(made).__name__}"
        hint = "return a module, and a function of a batch size and a length that returns its inputs by name"
        raise ConfigError("PG101", f"--module is {name!r}", why=why, hint=hint)
    return made
