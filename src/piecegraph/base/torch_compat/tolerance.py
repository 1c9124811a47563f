"""Where Dynamo goes on with a trace, though it would give up: at what changes no tensor."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from piecegraph.base.torch_compat.guards import source_name

_patching_dynamo = threading.RLock()
"""Held while Dynamo's classes are patched, so that two threads do not undo each other's patch."""

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


@contextlib.contextmanager
def going_on() -> Iterator[Tolerance]:
    """Dynamo goes on, inside, where it would give up at something that changes no tensor."""
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()  # made once, and not of what is in its place below
    with _patching_dynamo, contextlib.ExitStack() as undo:
        tolerance = Tolerance()  # finds what Dynamo has, and not another thread's patches
        for owner, name, patch in tolerance.patches():
            if hasattr(owner, name):
                undo.callback(setattr, owner, name, getattr(owner, name))
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, patch)
        yield tolerance


class Tolerance:
    """What Dynamo does in the place of giving up.

    Loggers, warnings, ``print`` and ``torch.backends.cudnn.flags`` are left out; ``requires_grad_()`` on what was
    computed without gradients, too; ``new_full`` with a tensor, which would be read on the host, fills with it instead.
    ``copy.deepcopy``, which torch 2.13 traces by itself, copies Python objects once, while tracing. A number on the CPU
    is data as any other: Dynamo would take it for the one of the trace, with a guard. Names that are taken for one
    another have a guard, whatever names they are, and reads of ``__dict__`` are noted.
    """

    def __init__(self) -> None:
        from torch._dynamo import guards
        from torch._dynamo.variables import builder, builtin, functions, misc, tensor, user_defined
        from torch._subclasses.fake_tensor import FakeTensorConverter

        self._builder, self._builtin, self._misc, self._tensor = builder, builtin, misc, tensor
        self._function = functions.UserFunctionVariable
        self._with_dict = (
            (user_defined.UserDefinedObjectVariable, "var_getattr"),
            (user_defined.MutableMappingVariable, "var_getattr"),
            (user_defined.UserDefinedClassVariable, "var_getattr"),
            (misc.PythonModuleVariable, "var_getattr"),
            (functions.UserFunctionVariable, "var_getattr"),
            (functions.UserFunctionVariable, "call_obj_hasattr"),
        )
        self._make_dupe_guard = guards.make_dupe_guard
        self._logger_call = misc.LoggingLoggerVariable.call_method
        self._ignored_call = misc.IgnoredFunctionVariable.call_function
        self._requires_grad = tensor.TensorVariable.method_requires_grad_
        self._copied = builtin.BuiltinVariable.call_deepcopy
        self._converter, self._converted = FakeTensorConverter, FakeTensorConverter.from_real_tensor
        self.left_out: dict[str, None] = {}
        """The calls that are in no graph, with their lines."""
        self.copies: list[Any] = []
        """Objects that were copied while tracing."""
        self.dicts: dict[str, None] = {}
        """Objects whose ``__dict__`` was read."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, what takes its place)."""
        from torch._dynamo import symbolic_convert, utils

        # Dynamo finds the name of every line's function by reading whole files, for a log that few ask for.
        is_logged = torch._logging._internal.log_state.is_artifact_enabled("trace_call")
        unlogged = [] if is_logged else [(symbolic_convert, "get_funcname", lambda file, line: None)]
        return [
            *unlogged,
            (self._misc.LoggingLoggerVariable, "call_method", _as_method(self._call_logger)),
            (self._misc.IgnoredFunctionVariable, "call_function", _as_method(self._call_ignored)),
            (self._tensor.TensorVariable, "method_requires_grad_", _as_method(self._require_grad)),
            (self._tensor.TensorVariable, "method_new_full", _as_method(self._new_full)),
            (self._builtin.BuiltinVariable, "call_deepcopy", _as_method(self._deepcopy)),
            (self._converter, "from_real_tensor", _as_method(self._convert)),
            (self._builder, "make_dupe_guard", self._guard_merged),
            *((owner, method, self._noting_dicts(getattr(owner, method))) for owner, method in self._with_dict),
            (torch.backends.cudnn, "flags", _without_cudnn_flags),
            (utils, "_get_dynamo_config_for_logging", lambda: None),  # cannot write functions (torch 2.11)
        ]

    def _leave_out(self, what: str, tx: Any) -> None:
        frame = tx.frame_summary() if tx.f_code.co_filename != __file__ else tx.parent.frame_summary()
        self.left_out[f"{what} at {frame.filename.rpartition('/')[2]}:{frame.lineno}"] = None

    def _call_logger(self, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.variables.constant import ConstantVariable

        if name not in _LOGGING and not name.endswith(("_once", "_advice")):
            return self._logger_call(variable, tx, name, *args, **kwargs)
        self._leave_out(f"logger.{name}", tx)
        return ConstantVariable.create(None)

    def _call_ignored(self, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        self._leave_out(variable.value.__name__.lstrip("_"), tx)
        return self._ignored_call(variable, tx, *args, **kwargs)

    def _require_grad(self, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if variable.source is not None:  # an argument or a weight: the caller would see it
            return self._requires_grad(variable, tx, *args, **kwargs)
        self._leave_out("requires_grad_", tx)
        return variable

    def _deepcopy(self, variable: Any, tx: Any, x: Any, *args: Any) -> Any:
        from torch._dynamo.source import GlobalSource
        from torch._dynamo.variables.base import VariableTracker

        if x.python_type() in _COPIED_PART_BY_PART:
            return tx.inline_user_function_return(VariableTracker.build(tx, _copied_deeply), [x], {})
        if x.source is None or tx.output.side_effects.has_pending_mutation(x):
            return self._copied(variable, tx, x, *args)
        known: dict[int, Any] = {}
        value = copy.deepcopy(x.value, known)
        if any(isinstance(part, torch.Tensor) for part in known.values()) or not hasattr(value, "__dict__"):
            return self._copied(variable, tx, x, *args)
        self.copies.append(value)
        name = tx.output.install_global_by_id(COPY, value)
        return VariableTracker.build(tx, value, GlobalSource(name))

    def _convert(self, converter: Any, *args: Any, **kwargs: Any) -> Any:
        fake = self._converted(converter, *args, **kwargs)
        fake.item_memo = None
        return fake

    def _guard_merged(self, source: Any, first: Any) -> Any:
        """Dynamo has no guard for an object with both a local and a global name, and takes the one for the other."""
        from torch._dynamo.guards import GuardBuilder

        guard = self._make_dupe_guard(source, first)
        if guard is None and first and first != source:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=first)
        return guard

    def _noting_dicts(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Asks for an attribute as Dynamo does, which guards no key that a ``__dict__`` does not have, and no attribute
        that a function does not have.
        """

        def noting(variable: Any, tx: Any, name: str) -> Any:
            is_key = name == "__dict__" or (isinstance(variable, self._function) and not name.startswith("__"))
            if is_key and variable.source is not None:
                self.dicts[source_name(variable.source)] = None
            return ask(variable, tx, name)

        return noting

    def _new_full(self, variable: Any, tx: Any, size: Any = None, fill_value: Any = None, *args: Any, **kw: Any) -> Any:
        if not isinstance(fill_value, self._tensor.TensorVariable) or args:
            return None  # Dynamo does it
        return variable.call_method(tx, "new_empty", [size], kw).call_method(tx, "fill_", [fill_value], {})


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class hands its instances to: a bound method would not be handed them."""
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def cudnn_flags() -> None:
    """Stands for a call of ``torch.backends.cudnn.flags`` that is left out."""


def _without_cudnn_flags(
    enabled: bool = False,
    benchmark: bool = False,
    benchmark_limit: int = 10,
    deterministic: bool = False,
    allow_tf32: bool = True,
    fp32_precision: str = "none",
) -> contextlib.AbstractContextManager[None]:
    """Which of cuDNN's kernels run is not part of a trace; how exact they are would be."""
    if not allow_tf32 or fp32_precision != "none":
        raise RuntimeError("torch.backends.cudnn.flags sets a precision")
    cudnn_flags()
    return contextlib.nullcontext()


COPY = "__piecegraph_copy"
"""How names of copies begin that were made while tracing: changes of them are nobody's."""

_COPIED_PART_BY_PART = (dict, list, tuple, str, int, float, bool, type(None), type, torch.dtype, torch.device)


def _copied_deeply(value: Any) -> Any:
    """``copy.deepcopy`` as Dynamo of torch 2.11 can trace it, but for objects."""
    if isinstance(value, dict):
        return {key: copy.deepcopy(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copy.deepcopy(part) for part in value]
    if isinstance(value, tuple):
        return tuple([copy.deepcopy(part) for part in value])
    return value
