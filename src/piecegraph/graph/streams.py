"""CUDA streams inside a traced graph: where they fork and join, and how such a region is run.

Note [Streams]
~~~~~~~~~~~~~~
A capture may not end while a forked stream is not joined, and no Stream may be handed from one piece to the next. So
everything from a fork to the join that closes it runs eagerly, as one cut, on the streams the user named. A wait for
a stream that was not forked here (work started outside the model) is a cut of its own. Stream objects are not values:
every region fetches them from the trace, which holds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat


def is_stream_object(node: torch.fx.Node) -> bool:
    """Whether a node fetches a Stream or Event."""
    return node.op == "call_function" and torch_compat.stream_op(node.target) == "get_object"


def uses_streams(node: torch.fx.Node) -> bool:
    """Whether a node is a stream op or is meant to run on a stream of its own."""
    return stream_call(node)[0] is not None or side_stream(node) is not None


def side_stream(node: torch.fx.Node) -> int | None:
    """The index of the stream a node was traced under, None for the ambient one."""
    custom = node.meta.get("custom")
    return custom.get("stream") if isinstance(custom, dict) else None


def stream_call(node: torch.fx.Node) -> tuple[str | None, list[int]]:
    """The stream op a node is, with the indices of its streams and events: (waiting, waited for) or (event, stream)."""
    if node.op == "call_function":
        op = torch_compat.stream_op(node.target)
        return (None, []) if op in (None, "get_object") else (op, [arg for arg in node.args if isinstance(arg, int)])
    objects = [arg for arg in node.args if isinstance(arg, torch.fx.Node) and is_stream_object(arg)]
    if node.op != "call_method" or not objects or objects[0] is not node.args[0]:
        return None, []
    indices = [int(arg.args[0]) for arg in objects]  # type: ignore[arg-type]
    name = str(node.target)
    if name in ("wait_event", "record_event"):  # stream.wait_event(event): the stream comes first
        return name, indices[::-1]
    return {"record": "record_event", "wait": "wait_event"}.get(name, name), indices


class StreamRegions:
    """The nodes of a graph that lie between a fork and its join. See Note [Streams]."""

    def __init__(self, graph: torch.fx.Graph, streams: Mapping[int, Any]) -> None:
        self._ambient = {index for index, stream in streams.items() if _is_current(stream)}
        self._event_stream: dict[int, int] = {}
        self._open: set[int] = set()
        self.nodes = [
            node for node in graph.nodes if node.op in ("call_function", "call_method") and self._is_inside(node)
        ]

    def _is_inside(self, node: torch.fx.Node) -> bool:
        was_open = bool(self._open)
        name, indices = stream_call(node)
        if name == "record_event" and len(indices) == 2:
            self._event_stream[indices[0]] = indices[1]
        elif name == "wait_event" and len(indices) == 2:
            self._wait(indices[1], self._event_stream.get(indices[0], -1))
        elif name == "wait_stream":
            self._wait(indices[0], indices[1])
        on_side = side_stream(node) not in (None, *self._ambient)
        return not is_stream_object(node) and (name is not None or was_open or bool(self._open) or on_side)

    def _wait(self, waiting: int, waited: int) -> None:
        if waited in self._open and waiting not in self._open:
            self._open.discard(waited)  # a join
        elif waiting not in self._ambient:
            self._open.add(waiting)  # a fork


class StreamInterpreter(torch.fx.Interpreter):
    """Runs a region node by node, each on its stream."""

    def __init__(self, module: torch.fx.GraphModule, streams: Mapping[int, Any]) -> None:
        super().__init__(module)
        self._streams = {index: None if _is_current(stream) else stream for index, stream in streams.items()}

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def run_node(self, n: torch.fx.Node) -> Any:
        side = side_stream(n)
        stream = self._object(side) if side is not None else None
        with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else contextlib.nullcontext():
            name, indices = stream_call(n)
            if n.op == "call_function" and name is not None:
                return self._run_stream_op(name, [self._object(i) for i in indices], n)
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_compat.stream_op(target) == "get_object":
            return self._object(args[0])
        return super().call_function(target, args, kwargs)

    def _object(self, index: int) -> Any:
        """A stream or event of the trace; the stream that was current then means the one that is current now."""
        held = self._streams.get(index)
        return held if held is not None or not torch.cuda.is_available() else torch.cuda.current_stream()

    def _run_stream_op(self, name: str, objects: list[Any], node: torch.fx.Node) -> None:
        if name == "wait_stream":
            objects[0].wait_stream(objects[1])
        elif name == "record_event":
            objects[0].record(objects[1])
        elif name == "wait_event":
            objects[0].wait(objects[1])
        elif name.startswith("synchronize") and objects:
            objects[0].synchronize()
        elif name == "record_stream":
            self.env[node.args[0]].record_stream(objects[0])  # type: ignore[index]
        else:
            super().run_node(node)


def _is_current(stream: Any) -> bool:
    is_stream = torch.cuda.is_available() and isinstance(stream, torch.Stream)
    return is_stream and stream == torch.cuda.current_stream(stream.device)
