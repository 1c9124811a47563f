"""Ops: what a graph calls, their names, schemas and kernels."""

from __future__ import annotations

import difflib
import functools
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from piecegraph.base.source_files import file_of

_BUILTIN_OPS = {
    operator.matmul: "matmul",
    operator.add: "add",
    operator.mul: "mul",
    operator.sub: "sub",
    operator.truediv: "div",
}

ORIGINAL_OF_SCRIPT = "_torchdynamo_inline"
"""Where a function of TorchScript has the Python function that it was made of, which Dynamo traces."""
_PACKED = ("lstm", "gru", "rnn_tanh", "rnn_relu")
TAKE_PACKED: tuple[Any, ...] = (
    *(getattr(torch, name) for name in (*_PACKED, "_pad_packed_sequence")),
    *(getattr(torch.ops.aten, name) for name in (*_PACKED, "_pad_packed_sequence")),
    *(getattr(torch.ops.aten, name).data for name in _PACKED),
    torch.ops.aten._pad_packed_sequence.default,
)
"""What takes packed sequences. How many of them each step has is read from memory of the host, by no op."""


def op_of(target: Any) -> tuple[Any, Any]:
    """An op as (packet, overload): overload is None where the target leaves it open, packet is the target if it is no
    op.

    Dynamo records ``torch.ops.ns.op`` as a packet, ``custom_op`` functions as an overload and ``F.linear`` as a
    builtin: all three must match what the user names, so all are mapped to the op object they call.
    """
    if isinstance(target, OpOverload):
        return target.overloadpacket, target
    if isinstance(target, OpOverloadPacket):
        return target, None
    if isinstance(target, CustomOpDef):
        return target._opoverload.overloadpacket, None
    name = target if isinstance(target, str) else _BUILTIN_OPS.get(target) or _torch_function_name(target)
    packet = getattr(torch.ops.aten, name, None) if name else None
    return (packet, None) if packet is not None else (target, None)


def _torch_function_name(target: Any) -> str:
    name = getattr(target, "__name__", "")
    is_method = getattr(target, "__objclass__", None) is torch._C.TensorBase
    is_torch = (getattr(target, "__module__", None) or "").startswith("torch") or getattr(torch, name, None) is target
    return name if is_method or is_torch else ""


def qualified_name(target: Any) -> str:
    """An op's ``ns::op`` or ``ns::op.overload``, empty for what is no op. The default overload is not spelled out."""
    packet, overload = op_of(target)
    if not isinstance(packet, OpOverloadPacket):
        return ""
    name = str(packet._qualified_op_name)
    return name if overload is None or overload._overloadname == "default" else f"{name}.{overload._overloadname}"


def find_op(name: str) -> Any:
    """The op called ``"ns::op"`` or ``"ns::op.overload"``, or None."""
    namespace, _, rest = name.partition("::")
    op_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op_name, None) if op_name else None
    if packet is None or not overload:
        return packet
    return getattr(packet, overload, None)


def similar_op(name: str) -> str:
    """The registered op whose name is closest, or an empty string."""
    names = {full.partition(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    close = difflib.get_close_matches(name.partition(".")[0], names, n=1)
    return close[0] if close else ""


def is_cudagraph_unsafe(target: Any) -> bool:
    """Whether the op's author tagged it as not capturable."""
    packet, overload = op_of(target)
    if overload is None and isinstance(packet, OpOverloadPacket):
        overload = getattr(packet, packet.overloads()[0], None)
    return isinstance(overload, OpOverload) and torch.Tag.cudagraph_unsafe in overload.tags


def draws_random_numbers(target: Any) -> bool:
    """Whether an op moves a random number generator on."""
    packet, overload = op_of(target)
    if overload is None and isinstance(packet, OpOverloadPacket):
        overload = getattr(packet, packet.overloads()[0], None)
    return isinstance(overload, OpOverload) and torch.Tag.nondeterministic_seeded in overload.tags


def is_op(target: Any) -> bool:
    """Whether something is an op as the dispatcher calls it."""
    return isinstance(target, OpOverload)


def is_higher_order(target: Any) -> bool:
    """Whether something is an op that calls functions it is given: ``cond``, ``flex_attention``."""
    return isinstance(target, HigherOrderOperator)


def chooses_by_data(target: Any) -> bool:
    """Whether an op reads data on the host to know what to run: ``torch.cond``, ``torch.while_loop``."""
    return isinstance(target, HigherOrderOperator) and target.name() in ("cond", "while_loop")


def tags_of(target: Any) -> Collection[torch.Tag] | None:
    """The tags of an overload; None for anything else."""
    return target.tags if isinstance(target, OpOverload) else None


def is_view(overload: OpOverload) -> bool:
    """Whether an op's schema says that it returns memory of its arguments and writes to none."""
    schema = overload._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and any(returned.alias_info is not None for returned in schema.returns)


def takes_device(overload: OpOverload) -> bool:
    """Whether an op can be told where its result is to be."""
    return any(argument.name == "device" for argument in overload._schema.arguments)


def written_args(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op's schema says it writes to. Empty for anything that is not an op with a schema."""
    packet, overload = op_of(target)
    if overload is None:
        if not isinstance(packet, OpOverloadPacket) or not isinstance(target, OpOverloadPacket):
            return []
        overload = getattr(packet, packet.overloads()[0])
    written = []
    for position, name in _written_places(overload):
        if name in kwargs:
            written.append(kwargs[name])
        elif position < len(args):
            written.append(args[position])
    return written


@functools.cache
def _written_places(overload: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(overload._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def schema_of(target: Any) -> str:
    """The schema of an op's default overload, as it is defined: ``linear(Tensor x) -> Tensor``."""
    packet, overload = op_of(target)
    return str((overload or packet.default)._schema).partition("::")[2]


def home_of_op(target: Any) -> str:
    """The module that registers a ``torch.library.custom_op``; empty if it cannot be imported, or is not known."""
    packet, overload = op_of(target)
    definition = OPDEFS.get((overload or packet.default)._name)
    home = "" if definition is None else str(definition._init_fn.__module__)
    return "" if home == "__main__" else home


def modules_of_ops(targets: Iterable[Any]) -> list[str]:
    """The modules that register ops, as far as they are Python's: whoever imports them has the ops.

    Who makes fake results is known by its file (torch 2.11 to 2.13).
    """
    from torch._library.simple_registry import singleton

    files = {file_of(module): name for name, module in list(sys.modules.items())}
    found: dict[str, None] = {}
    for target in targets:
        name = kept_op_name(target)
        if name is None or name.startswith(("aten::", "prims::")):
            continue
        home = home_of_op(target)
        kernel = singleton.find(name.partition(".")[0]).fake_impl.kernel
        if not home and kernel is not None:
            home = files.get(kernel.source.rpartition(":")[0], "")
        if home not in ("", "__main__"):
            found[home] = None
    return list(found)


def direct_kernel(target: Any, device_type: str) -> Any:
    """The Python function behind a ``torch.library.custom_op``, or the target itself.

    The dispatcher and the autograd wrapper cost 15 to 40 us a call around such an op; a tape has no gradients and
    fixed devices.
    """
    _, overload = op_of(target)
    if isinstance(target, OpOverloadPacket):
        overload = getattr(target, "default", None)
    definition = OPDEFS.get(overload._name) if isinstance(overload, OpOverload) else None
    if definition is None or definition._disabled_kernel:
        return target
    if device_type in definition._backend_fns or None not in definition._backend_fns:
        return target  # a kernel of its own for this device: torch picks it
    return definition._init_fn


def stream_op(target: Any) -> str | None:
    """The name of a stream op in a Dynamo graph (``wait_stream``, ``record_event``, ...), or None.

    torch 2.11 records method calls on stream objects, 2.13 records ``torch.ops.streams``; both fetch objects by index.
    """
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    if target is get_external_object_by_index:
        return "get_object"
    name = qualified_name(target) if isinstance(target, (OpOverload, OpOverloadPacket)) else ""
    return name.removeprefix("streams::") if name.startswith("streams::") else None


def kept_op_name(target: Any) -> str | None:
    """What :func:`find_op` finds an op by in another process; None for what is no op."""
    if isinstance(target, OpOverload):
        return f"{target.overloadpacket._qualified_op_name}.{target._overloadname}"
    return str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else None


def op_definition(target: Any) -> tuple[str, list[Any]]:
    """An op's schema, and the Python functions that are known to stand behind it."""
    _, overload = op_of(target)
    if isinstance(target, OpOverloadPacket):
        overload = getattr(target, target.overloads()[0], None)
    if not isinstance(overload, OpOverload):
        return "", []
    definition = OPDEFS.get(overload._name)
    if definition is None:
        return str(overload._schema), []
    functions = [definition._init_fn, definition._abstract_fn, *definition._backend_fns.values()]
    return str(overload._schema), [function for function in functions if function is not None]
