"""What the user asked for: validated once, frozen, and never changed by what happens later.

The arguments of :func:`piecegraph.compile` come in; a :class:`CompileConfig` comes out, or a
:class:`~piecegraph.errors.ConfigError` that names the argument.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from piecegraph.base.events import OnFallback
from piecegraph.errors import ConfigError

CudagraphMode = Literal["auto", "piecewise", "full", "none"]
Padding = Literal["auto", "always", "never"]
Frontend = Literal["auto", "trace", "breakable"]
GraphDeviceName = Literal["auto", "simulated"]
AddressChecks = Literal["first", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The rarely needed settings, given as ``options={...}``."""

    clone_outputs: bool = True
    """Give the caller its own copy of every result. ``False`` saves the copy; results are then valid until the next
    call.
    """
    lazy: bool | Literal["auto"] = "auto"
    """Record a size when it is first used. ``"auto"``: lazily for a ladder, all at once for sizes that were listed."""
    max_capture_size: int = 2048
    """Where the ladder of ``capture_sizes="auto"`` ends."""
    max_sizes: int = 64
    """How many sizes may be recorded lazily; further ones run without graphs, counted."""
    max_signatures: int = 8
    """How many plans a function without a size dimension may have; further inputs run eagerly, counted."""
    max_paths: int = 4
    """How many ways through a function are recorded at a size, where what Python reads of data decides which it is."""
    prepare: Callable[[dict[str, int]], None] | None = None
    """Called before every run made for recording, with the real size of each dynamic dimension, so that cut ops that
    read host state (attention metadata) find a batch that fits.
    """
    pad_values: Mapping[str, float] = field(default_factory=dict)
    """What an input's padded rows hold, by input name. Zero unless given; a slot mapping wants -1."""
    static_inputs: Sequence[str] = ()
    """Inputs that are always the same memory (a KV cache): read in place, not copied."""
    fuse_linears: bool = False
    """Join linears that take the same input (q, k and v; gate and up) into one matmul. The parameters become views of
    joint memory, until ``close()``.
    """
    check_addresses: AddressChecks = "first"
    """When to compare the addresses a tape reads with those it was recorded with: at its first replay, or at every
    one.
    """
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for the pieces, as ``torch.compile(options=...)`` takes them."""
    graph_device: GraphDeviceName = "auto"
    """``"simulated"``: on a CPU, record and replay as CUDA graphs do, with fixed addresses and recycled memory."""
    provenance: bool = False
    """Write down which line of the model put which kernels into the graphs, for ``trace()`` and ``kernels``: recording
    takes longer, replays do not.
    """
    cache: bool = True
    """Keep plans on disk, so that another process neither traces nor compiles; see docs/cache.md."""
    progress: bool | Literal["auto"] = "auto"
    """Show progress bars on standard error. ``"auto"``: when it is a terminal."""
    dump: str | os.PathLike[str] | None = None
    """A folder to leave graphs, pieces, repros and an index in; see :func:`piecegraph.dump`."""
    dump_inputs: bool = False
    """Save the tensors that go into each distinct piece there, too."""

    def __post_init__(self) -> None:
        for name in ("max_capture_size", "max_sizes", "max_signatures", "max_paths"):
            value = getattr(self, name)
            if not _is_positive_int(value):
                raise ConfigError("PG101", f"options[{name!r}] is {value!r}", why="it must be a positive integer")
        _check_choice("options['provenance']", self.provenance, (True, False))
        _check_choice("options['cache']", self.cache, (True, False))
        _check_choice("options['dump_inputs']", self.dump_inputs, (True, False))
        if self.dump is not None:
            check_folder("options['dump']", self.dump)
        _check_choice("options['lazy']", self.lazy, (True, False, "auto"))
        _check_choice("options['progress']", self.progress, (True, False, "auto"))
        _check_choice("options['check_addresses']", self.check_addresses, get_args(AddressChecks))
        _check_choice("options['graph_device']", self.graph_device, get_args(GraphDeviceName))
        if self.prepare is not None and not callable(self.prepare):
            raise ConfigError(
                "PG101", "options['prepare'] is not callable", why="it is called with the sizes before each run"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """The arguments of :func:`piecegraph.compile`, validated."""

    splitting_ops: Literal["auto"] | tuple[Any, ...] = "auto"
    capture_sizes: Literal["auto"] | tuple[tuple[int, ...], ...] = "auto"
    """Largest first; one integer for each dynamic dimension."""
    cudagraph_mode: CudagraphMode = "auto"
    padding: Padding = "auto"
    dynamic_dims: Literal["auto"] | Mapping[str, Any] = "auto"
    backend: str | Callable[..., Any] = "inductor"
    frontend: Frontend = "auto"
    options: Options = field(default_factory=Options)
    passes: tuple[Callable[..., Any], ...] = ()
    on_fallback: OnFallback = "warn"

    def __post_init__(self) -> None:
        _check_choice("cudagraph_mode", self.cudagraph_mode, get_args(CudagraphMode))
        _check_choice("padding", self.padding, get_args(Padding))
        _check_choice("frontend", self.frontend, get_args(Frontend))
        _check_choice("on_fallback", self.on_fallback, get_args(OnFallback))
        if isinstance(self.backend, str):
            _check_choice("backend", self.backend, ("inductor", "eager"))
        elif not callable(self.backend):
            raise ConfigError(
                "PG101", f"backend is {self.backend!r}", why='it must be "inductor", "eager" or a callable'
            )
        for fx_pass in self.passes:
            if not callable(fx_pass):
                raise ConfigError(
                    "PG101", f"passes holds {fx_pass!r}", why="an FX pass is a callable that takes a GraphModule"
                )

    @property
    def is_lazy(self) -> bool:
        """Whether sizes are recorded when first used."""
        return self.capture_sizes == "auto" if self.options.lazy == "auto" else self.options.lazy


def make_config(**arguments: Any) -> CompileConfig:
    """Turn the keyword arguments of :func:`piecegraph.compile` into a config.

    >>> make_config(capture_sizes=[1, 8]).capture_sizes
    ((8,), (1,))
    >>> make_config(padding="sometimes")
    Traceback (most recent call last):
        ...
    piecegraph.errors.ConfigError: PG101 padding is 'sometimes': it must be one of 'auto', 'always', 'never'
    """
    arguments["capture_sizes"] = _normalise_sizes(arguments.get("capture_sizes", "auto"))
    arguments["options"] = _make_options(arguments.get("options") or {})
    arguments["passes"] = tuple(arguments.get("passes", ()))
    ops = arguments.get("splitting_ops", "auto")
    if ops != "auto":
        if isinstance(ops, str) or not isinstance(ops, Iterable):
            raise ConfigError(
                "PG104", f"splitting_ops is {ops!r}", why='it must be "auto" or a list of ops', hint='write ["ns::op"]'
            )
        arguments["splitting_ops"] = tuple(ops)
    return CompileConfig(**arguments)


def _make_options(given: Mapping[str, Any]) -> Options:
    known = [f.name for f in fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(known)}"
            raise ConfigError("PG101", f"unknown option {name!r}", hint=hint)
    return Options(**given)


def _normalise_sizes(sizes: Any) -> Literal["auto"] | tuple[tuple[int, ...], ...]:
    if isinstance(sizes, str) and sizes == "auto":
        return "auto"
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ConfigError(
            "PG102", f"capture_sizes is {sizes!r}", why='it must be "auto" or a list of positive integers'
        )
    keys = [tuple(size) if isinstance(size, (tuple, list)) else (size,) for size in sizes]
    if not keys:
        raise ConfigError("PG102", "capture_sizes is empty", hint='give at least one size, or cudagraph_mode="none"')
    for key in keys:
        if not key or not all(_is_positive_int(n) for n in key):
            raise ConfigError(
                "PG102", f"capture_sizes holds {key[0] if len(key) == 1 else key!r}", why="sizes are positive integers"
            )
    if len({len(key) for key in keys}) > 1:
        raise ConfigError("PG102", "capture_sizes mixes sizes of one and of several dimensions")
    return tuple(sorted(set(keys), reverse=True))


def check_folder(name: str, value: Any) -> str | os.PathLike[str]:
    """A folder that was given. What is there is seen when it is written to."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigError("PG101", f"{name} is {value!r}", why="it must be the name of a folder")
    return value


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ConfigError("PG101", f"{name} is {value!r}", why=f"it must be one of {', '.join(map(repr, choices))}")
