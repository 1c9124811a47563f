"""Dynamo: a function becomes one graph, and what it would have guarded."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.fx

from piecegraph.base.torch_compat.fakes import let_go_of_tensors
from piecegraph.base.torch_compat.guards import bound_arguments, evaluate, outside_names, outside_scopes, source_name
from piecegraph.base.torch_compat.tolerance import COPY, cudnn_flags, going_on


@dataclass(frozen=True)
class DynamoCapture:
    """What Dynamo knows after tracing one function once."""

    graph_module: torch.fx.GraphModule | None
    """None when the function does no tensor work at all."""
    example_inputs: tuple[Any, ...]
    """The real object behind each placeholder, in order; symbolic sizes are SymInts."""
    fake_mode: Any
    external_objects: Mapping[int, Any]
    """Streams and events that the graph refers to by index; held here, because Dynamo's own table is weak."""
    run_bytecode: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Given a function for the graph, the function with the user's signature that Dynamo generated around it."""
    touched: Mapping[str, Any]
    """Python objects outside the function that it changes, by name. Running the generated code changes them."""
    names_in_code: frozenset[str]
    """Among them are those of all attributes that the generated code sets."""
    sources: tuple[str, ...]
    """The expression that leads to each placeholder's object."""
    constants: tuple[str, ...]
    """Expressions for the numbers and strings that were read from globals, closures and the module."""
    scopes: dict[str, Any]
    """What the expressions are evaluated in."""
    left_out: tuple[str, ...]
    """What the function does that is in no graph and changes no tensor, with the lines."""
    code: tuple[CodeType, ...]
    """All Python that was read for the trace."""
    imports: Mapping[str, str]
    """The modules that expressions name, by the names they have there."""
    sizes: tuple[tuple[torch.Tensor, int, Any], ...] = ()
    """Every symbolic size of an argument, with the tensor and the dimension: also of one that is no input of the graph,
    because nothing but its size is read.
    """


def dynamo_capture(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    traced_as: Callable[..., Any] | None = None,
) -> DynamoCapture:
    """Trace a function or bound method into one graph, without installing anything on its code object.

    ``torch.compile`` would keep guards and a cache entry on the code object that all instances of a class share.

    ``traced_as`` is traced instead, if it is given: the same code with another model. What the graph reads is looked up
    in ``function`` all the same.
    """
    from torch._dynamo import config, convert_frame, graph_bytecode_inputs
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    settings = config.patch(
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        automatic_dynamic_shapes=False,
        side_effect_replay_policy="warn",
        allow_rnn=True,
        ignore_logging_functions={cudnn_flags, warnings.warn, print},
    )
    with (
        torch.no_grad(),
        settings,
        going_on() as gone_on,
        get_metrics_context(),
        dynamo_timed("piecegraph.trace"),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        captured = convert_frame.fullgraph_capture(traced_as or function, args, kwargs)
    objects = {i: ref() for i, ref in graph_bytecode_inputs.index_to_external_object_weakref.items()}
    backend_input = captured.backend_input
    plain_function = getattr(function, "__func__", function)
    receiver = (function.__self__,) if hasattr(function, "__self__") else ()
    arguments = bound_arguments(function, args, kwargs)
    outer = inspect.getclosurevars(plain_function).nonlocals
    call_scopes = {"L": {**outer, **arguments}, "G": plain_function.__globals__}
    output = captured.graph_capture_output
    imports = {name: module for name, module in output.import_sources.items() if not module.startswith("torch")}
    scopes = outside_scopes(function, imports, args, kwargs)
    of_graph: dict[str, Any] = {"graph_module": None, "example_inputs": (), "fake_mode": None, "sources": ()}
    if backend_input is not None:
        fake_mode = backend_input.fake_mode
        placeholders = backend_input.graph_module.graph.find_nodes(op="placeholder")
        of_graph = {
            "graph_module": backend_input.graph_module,
            "example_inputs": tuple(backend_input.example_inputs),
            "fake_mode": fake_mode,
            "sources": tuple(source_name(getattr(node, "_dynamo_source", None)) for node in placeholders),
            "sizes": _symbolic_sizes(fake_mode, call_scopes),
        }
        values = (node.meta.get("example_value") for node in placeholders)
        let_go_of_tensors(value for value in values if hasattr(value, "fake_mode"))
    texts = (each for each in output.bytecode.co_consts if isinstance(each, str))
    return DynamoCapture(
        **of_graph,
        external_objects=objects,
        run_bytecode=functools.partial(_around_graph, captured, plain_function, receiver, gone_on.copies),
        touched=_touched_objects(told, call_scopes),
        names_in_code=frozenset((*output.bytecode.co_names, *texts)),
        constants=outside_names(output, plain_function, receiver, arguments, gone_on.dicts, imports, scopes),
        scopes=scopes,
        left_out=tuple(gone_on.left_out),
        code=tuple(output.traced_code),
        imports=imports,
    )


def _around_graph(
    captured: Any,
    plain_function: Callable[..., Any],
    receiver: tuple[Any, ...],
    copies: Sequence[Any],
    graph_function: Callable[..., Any],
) -> Callable[..., Any]:
    """The code that Dynamo generated around a graph, with a function in the graph's place."""
    environment = captured.graph_capture_output.get_runtime_env()
    backend_id = "no_graph" if captured.backend_input is None else captured.backend_input.backend_id
    names = {**vars(builtins), **plain_function.__globals__}  # torch 2.11 does not look for builtins itself
    generated = environment.forward_callable(backend_id, graph_function, extra_globals=names)

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [dict(vars(value)) for value in copies]
        try:
            return generated(*receiver, *args, **kwargs)
        finally:  # a copy of the trace's is changed by every run, and every run is to find it as it was
            for value, state in zip(copies, before, strict=True):
                vars(value).clear()
                vars(value).update(state)

    return run


def _symbolic_sizes(fake_mode: Any, scopes: Mapping[str, Any]) -> tuple[tuple[torch.Tensor, int, Any], ...]:
    """torch 2.11 to 2.13: where each symbol comes from is known to the shape environment alone."""
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    sizes: list[tuple[torch.Tensor, int, Any]] = []
    for symbol, sources in fake_mode.shape_env.var_to_sources.items():
        for source in sources:
            if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE:
                owner = evaluate(source_name(source.base), scopes)
                if isinstance(owner, torch.Tensor) and source.idx is not None:
                    sizes.append((owner, source.idx, fake_mode.shape_env.create_symintnode(symbol, hint=None)))
    return tuple(sizes)


_SIDE_EFFECTS = re.compile(r"found certain side effects .* you can double check: (\[.*\])", re.DOTALL)


def _touched_objects(told: Sequence[warnings.WarningMessage], scopes: Mapping[str, Any]) -> dict[str, Any]:
    """The objects behind the source names (``L['self']``, ``G['module'].state``) that Dynamo warned of; other
    warnings go on.
    """
    touched: dict[str, Any] = {}
    for warning in told:
        found = _SIDE_EFFECTS.search(str(warning.message))
        if found is None and str(warning.message).startswith("Dynamo detected"):  # a remark on tracing
            continue
        if found is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            continue
        for name in ast.literal_eval(found.group(1)):
            if not name.startswith(f"G['{COPY}"):
                touched[name] = evaluate(name, scopes)
    return touched


def explain_dynamo_error(error: BaseException) -> tuple[list[tuple[str, int]], str, str]:
    """The traced stack as (file, line), outermost first, the reason, and Dynamo's first hint."""
    stack = [(frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or []]
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    reason = lines[0] if lines else type(error).__name__
    explanation = next((text.removeprefix("Explanation: ") for text in lines if text.startswith("Explanation: ")), "")
    hint = next((text.removeprefix("Hint: ") for text in lines if text.startswith("Hint: ")), "")
    raised = next((text for text in lines if text.startswith("Developer debug context: raised exception ")), "")
    if raised:  # the user's code itself raises; what Dynamo thinks of that explains nothing
        return stack, raised.removeprefix("Developer debug context: "), ""
    return stack, f"{reason}: {explanation}" if explanation else reason, hint


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo for a symbolic size."""
    torch._dynamo.mark_dynamic(tensor, dim)


def dynamic_marks(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions a user marked with ``mark_dynamic`` or ``maybe_mark_dynamic``."""
    strict = getattr(tensor, "_dynamo_dynamic_indices", ())
    weak = getattr(tensor, "_dynamo_weak_dynamic_indices", ())
    return tuple(sorted({*strict, *weak}))
