"""What a user calls: :func:`compile`, :func:`install`, :func:`eager`."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import CompileConfig, CudagraphMode, Frontend, Padding, make_config
from piecegraph.base.events import OnFallback
from piecegraph.base.plan import Plan
from piecegraph.engine.engine import Engine, running_eagerly
from piecegraph.engine.planner import Subject
from piecegraph.engine.report import explain_engine, stats_of
from piecegraph.errors import ConfigError
from piecegraph.explain.ranks import report_failure
from piecegraph.provenance.live import LiveKernels

if TYPE_CHECKING:
    from piecegraph.provenance.trace import Trace


class _Compiled:
    """What compiled functions and modules have in common."""

    _engine: Engine

    def capture(self, *example: Any, **kwargs: Any) -> Any:
        """Plan for a call like this one and record its sizes now, not at the first call.

        With listed ``capture_sizes`` all of them are recorded, otherwise the ladder up to the example's size. Returns
        the compiled object.
        """
        self._engine.capture(example, kwargs)
        return self

    def explain(self) -> str:
        """How calls are run, as text: pieces, cuts with reasons, sizes, every decision and every fallback."""
        return explain_engine(self._engine)

    def stats(self) -> dict[str, Any]:
        """The same as numbers."""
        return stats_of(self._engine)

    def report(self, path: str | os.PathLike[str], *, trace: Trace | None = None) -> Path:
        """Write the same as one HTML file to share, which needs no network.

        Args:
            path: where to.
            trace: what :func:`piecegraph.trace` has seen of it: its timeline and kernels come on the page, too.
        """
        # They take a while to import, and few write a page.
        from piecegraph.engine.report_page import report_of
        from piecegraph.provenance.trace import report_with

        return report_with(report_of(self._engine), trace, path)

    @property
    def plan(self) -> Plan | None:
        """The plan of the first kind of call seen, None before the first call."""
        return self._engine.plans[0].plan if self._engine.plans else None

    @property
    def kernels(self) -> LiveKernels:
        """The kernels of the recorded graphs, to choose some, leave them out and see what they cost.

        It takes ``options={"provenance": True}``.
        """
        return LiveKernels(self._engine.recorded)

    def close(self) -> None:
        """Give back graphs and memory. The original goes on working."""
        self._engine.close()


class CompiledFunction(_Compiled):
    """A function run through its plan."""

    def __init__(self, function: Callable[..., Any], engine: Engine) -> None:
        self._engine = engine
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        compiled = _compile(copy.deepcopy(self._engine.subject.function, memo), self._engine.config)
        assert isinstance(compiled, CompiledFunction)
        return compiled

    def __reduce__(self) -> tuple[Any, ...]:
        return _compile, (self._engine.subject.function, self._engine.config)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise ConfigError(
            "PG105",
            f"{self._engine.subject.name} is a method",
            why="instances would share one plan",
            hint="compile each instance, or install() a module",
        )


class CompiledModule(_Compiled, torch.nn.Module):
    """A module run through its plan.

    It is a view of the original: parameters, buffers, submodules, hooks and attributes are the original's.
    """

    _hooks: tuple[Mapping[int, Any], ...]
    """All that a module's call looks for, its own and those of all modules."""

    def __init__(self, original: torch.nn.Module, engine: Engine) -> None:
        super().__init__()
        state = self.__dict__
        for name in list(state):
            # Containers are the original's own, so every method of nn.Module works on it; all else is looked up there.
            if isinstance(state[name], (dict, set)):
                state[name] = getattr(original, name)  # a traced module of TorchScript passes some on
            else:
                del state[name]
        state["_engine"] = state["forward"] = engine
        state["_original"] = original
        own = (state[name] for name in torch_compat.HOOKS_OF_A_CALL)
        state["_hooks"] = (*own, *torch_compat.global_hooks_of_a_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A module's own way to its forward takes two more calls, which a short replay feels.
        return super().__call__(*args, **kwargs) if any(self._hooks) else self._engine(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        """Moving or converting the weights (``to``, ``half``) ends every plan: its graphs read the old ones."""
        self.__dict__["_original"]._apply(fn, recurse)
        self._engine.forget()
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_original"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_original"], name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.__dict__["_original"])})

    def __repr__(self) -> str:
        return f"piecegraph.compile({self.__dict__['_original']!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        original = copy.deepcopy(self.__dict__["_original"], memo)
        return _compile_module(original, self._engine.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return _compile_module, (self.__dict__["_original"], self._engine.config)


class Installed(_Compiled):
    """What :func:`install` returns: the module's ``forward`` now runs the plan."""

    def __init__(self, module: torch.nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._module = module
        self._own_forward = vars(module).get("forward")
        module.forward = engine  # type: ignore[method-assign]

    def close(self) -> None:
        """Give back graphs and memory, and put the module's own ``forward`` back."""
        super().close()
        if self._module.__dict__.get("forward") is not self._engine:
            return
        del self._module.forward
        if self._own_forward is not None:
            self._module.forward = self._own_forward  # type: ignore[method-assign]


def compile(
    model: Any = None,
    *,
    splitting_ops: Literal["auto"] | Sequence[Any] = "auto",
    capture_sizes: Literal["auto"] | Sequence[int] | Sequence[tuple[int, ...]] = "auto",
    cudagraph_mode: CudagraphMode = "auto",
    padding: Padding = "auto",
    dynamic_dims: Literal["auto"] | Mapping[str, Any] = "auto",
    backend: str | Callable[..., Any] = "inductor",
    frontend: Frontend = "auto",
    options: Mapping[str, Any] | None = None,
    passes: Sequence[Callable[..., Any]] = (),
    on_fallback: OnFallback = "warn",
    disable: bool = False,
) -> Any:
    """Run a module or function through piecewise CUDA graphs, or through the same compiled pieces on a CPU.

    Args:
        model: an ``nn.Module`` or a function. Left out, ``compile`` is a decorator.
        splitting_ops: ops that stay outside the graphs: op objects, overloads or ``"ns::op"``. ``"auto"`` cuts at
            registered cut ops. Ops tagged ``cudagraph_unsafe``, host syncs, data-dependent shapes and stream forks are
            cut in any case.
        capture_sizes: sizes to record; tuples for several dynamic dimensions. ``"auto"`` is a ladder, recorded as
            sizes occur.
        cudagraph_mode: ``"piecewise"``, ``"full"`` (one graph, an error if the model must be cut) or ``"none"``.
        padding: whether a call may run as the next larger recorded size: ``"always"``, ``"never"``, or ``"auto"``,
            which tries, with NaN in the padding, that it changes nothing.
        dynamic_dims: ``{"input_ids": 0}``, ``{"x": (0, 1)}`` or ``{"x": {0: "batch"}}``. ``"auto"``: dimensions marked
            with ``mark_dynamic``, else dimension 0 of every argument annotated as a tensor.
        backend: what compiles the pieces: ``"inductor"``, ``"eager"`` (nothing), or a callable as ``torch.compile``
            takes.
        frontend: ``"trace"``; ``"breakable"``: no compiler, the code runs as it is, and what no graph can hold breaks
            the capture; ``"auto"``: a trace if there can be one.
        options: rarely needed settings, see :class:`piecegraph.base.config.Options`.
        passes: FX passes, run on every piece before it is compiled.
        on_fallback: what to do when a call cannot be served from its plan: ``"warn"`` once, ``"raise"`` or
            ``"ignore"``. It is always counted.
        disable: return the model as it is.

    Returns:
        A callable that stands in for the model, with ``capture``, ``explain``, ``stats``, ``report``, ``plan`` and
        ``close``.

    Example:
        >>> import torch
        >>> fast = compile(torch.nn.Linear(4, 2), backend="eager", dynamic_dims={"input": 0})
        >>> with torch.no_grad():
        ...     fast(torch.ones(3, 4)).shape
        torch.Size([3, 2])
        >>> fast.stats()["coverage"]
        1.0
    """
    config = make_config(
        splitting_ops=splitting_ops,
        capture_sizes=capture_sizes,
        cudagraph_mode=cudagraph_mode,
        padding=padding,
        dynamic_dims=dynamic_dims,
        backend=backend,
        frontend=frontend,
        options=options,
        passes=passes,
        on_fallback=on_fallback,
    )
    if model is None:
        return lambda function: function if disable else _compile(function, config)
    return model if disable else _compile(model, config)


def _compile(model: Any, config: CompileConfig) -> CompiledModule | CompiledFunction:
    if isinstance(model, CompiledModule | CompiledFunction):
        raise ConfigError("PG105", "the model is compiled already", hint="compile the original with other arguments")
    if isinstance(model, torch.nn.Module):
        return _compile_module(model, config)
    if not callable(model) or isinstance(model, type):
        raise ConfigError(
            "PG105",
            f"cannot compile a {type(model).__name__}",
            why="only modules and functions can be called with tensors",
        )
    name = getattr(model, "__qualname__", type(model).__name__)
    return CompiledFunction(model, Engine(Subject(model, name, None), config, report_failure))


def install(module: torch.nn.Module, **arguments: Any) -> Installed:
    """Replace a module's ``forward`` in place, for a module that sits inside a larger model.

    Args:
        module: the module; its class is not touched, so other instances are as they were.
        arguments: as for :func:`compile`.

    Returns:
        An object with ``capture``, ``explain``, ``stats``, ``report``, ``plan`` and ``close``, which undoes the
        installation.
    """
    if not isinstance(module, torch.nn.Module) or isinstance(module, CompiledModule):
        raise ConfigError(
            "PG105",
            f"cannot install into a {type(module).__name__}",
            why="it must be an nn.Module that is not compiled yet",
        )
    if isinstance(module.__dict__.get("forward"), Engine):
        raise ConfigError(
            "PG105", f"{type(module).__name__} has been installed already", hint="close() the first installation"
        )
    engine = Engine(Subject(module.forward, type(module).__name__, module), make_config(**arguments), report_failure)
    return Installed(module, engine)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Inside this context every compiled or installed module runs its original code."""
    with running_eagerly():
        yield


def _compile_module(module: torch.nn.Module, config: CompileConfig) -> CompiledModule:
    return CompiledModule(
        module, Engine(Subject(module.forward, type(module).__name__, module), config, report_failure)
    )
