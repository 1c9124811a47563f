"""What Python gets to know of data while a function is recorded as it runs, and what has to run between graphs for it.

Note [Paths]
~~~~~~~~~~~~
A function that asks for a number (``item()``, ``bool(tensor)``), or for memory whose size depends on data
(``nonzero()``), may go another way when the answer is another. So each such call ends the graph under way and becomes a
step that asks again at every replay. The same answer as in the recording goes on; another one leaves the tape
(:class:`PathLeft`), before anything of the caller's was written, for a tape that was recorded with that answer. All
that Python can see of data passes through such a step, so two runs with the same answers are the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.structure import LEAF, Structure, atoms, flatten

_aten = torch.ops.aten

_TO_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__)
"""They read memory of the host without an op."""

_SPLIT = (torch.tensor_split, torch.Tensor.tensor_split, _aten.tensor_split)
_READ_ARGUMENTS = {
    **dict.fromkeys((*_SPLIT, _aten.tensor_split.tensor_indices_or_sections), (1, "tensor_indices_or_sections")),
    **dict.fromkeys(torch_compat.TAKE_PACKED, (1, "batch_sizes")),
    torch.tensordot: (2, "dims"),
}
"""They read one argument without an op that modes see, if it is a tensor of whole numbers: where it is, and its name.
Recurrent layers have their state in that place where they are given no packed sequences."""

_FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
"""They write memory of the host without an op that modes see, and copy it to the device."""

_UNTAGGED = (_aten._pack_padded_sequence.default, _aten._nested_tensor_from_mask.default)
"""The sizes of their results depend on data, and their tags do not say so."""

NESTED = (
    "a nested tensor is made of data, and no plan knows its sizes; nn.TransformerEncoder makes one where it is given a "
    "padding mask, unless it is made with enable_nested_tensor=False"
)
"""Why a function is not served."""

_INDEXING = (_aten.index.Tensor, _aten._unsafe_index.Tensor)
_INDEXED_BY_PYTHON = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_INDEXED_WRITES = (_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class PathLeft(Exception):  # noqa: N818 - no error: the call goes on elsewhere
    """A read gave something else than in the recording."""

    def __init__(self, index: int, answer: Any) -> None:
        super().__init__(index, answer)
        self.index = index
        """Of the read among those of its tape."""
        self.answer = answer


class FlatResult:
    """Calls a function and returns the leaves of its result; what Python can see of them must stay as it was.

    Args:
        function: what is called.
        look: what of the leaves must stay.
        changed: makes the exception to raise if it does not.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        look: Callable[[Sequence[Any]], list[Any]],
        changed: Callable[[tuple[Structure, list[Any]]], Exception],
    ) -> None:
        self._function = function
        self._look = look
        self._changed = changed
        self.structure = LEAF
        self.seen: list[Any] | None = None
        """As in the first call; None before."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        leaves, _, structure = flatten(self._function(*args, **kwargs))
        seen = self._look(leaves)
        if self.seen is None:
            self.structure, self.seen = structure, seen
        elif structure != self.structure or seen != self.seen:
            raise self._changed((structure, seen))
        return leaves

    @property
    def answer(self) -> tuple[Structure, list[Any]]:
        """All that Python can see of the first result."""
        assert self.seen is not None, "not called yet"
        return self.structure, self.seen


def other_than_tensors(leaves: Sequence[Any]) -> list[Any]:
    """The leaves themselves, but for tensors."""
    return [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def all_visible(leaves: Sequence[Any]) -> list[Any]:
    """What Python can see of leaves without reading them: of tensors all but their data."""
    return [_visible(leaf) for leaf in leaves]


def _visible(leaf: Any) -> Any:
    if isinstance(leaf, (float, complex)):
        return repr(leaf)  # NaN is itself, and -0.0 is not 0.0
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            raise RuntimeError(NESTED)
        return leaf.dtype, tuple(leaf.shape)
    if hasattr(leaf, "tobytes"):  # an array
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    return leaf


def show_answer(answer: tuple[Structure, list[Any]]) -> str:
    """What was read, in a few words."""
    shown = [str(part[1]) if isinstance(part, tuple) else str(part) for part in answer[1][:4]]
    return ", ".join([*shown, "..."] if len(answer[1]) > 4 else shown)


def reads_data(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether what Python sees of a call's result depends on data, or what the call runs."""
    if function in _INDEXING:
        return _has_mask(args[1])
    if torch_compat.chooses_by_data(function):
        return True
    tags = torch_compat.tags_of(function) or ()
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return True
    return any(function is known for known in (*_TO_PYTHON, *_UNTAGGED)) or reads_argument(function, args, kwargs)


def reads_argument(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call reads data where none of the ops that it is made of shows it."""
    if function not in _READ_ARGUMENTS:
        return False
    position, name = _READ_ARGUMENTS[function]
    given = args[position] if position < len(args) else kwargs.get(name)
    return isinstance(given, torch.Tensor) and not given.is_floating_point()


def hands_out_memory(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call gives another library memory of the host: what is done with it is no step that is repeated."""
    return function is torch.Tensor.__dlpack__ and args[0].device.type == "cpu"


def shows_memory(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call shows memory of the host to numpy, which may write to it without an op."""
    return function in (torch.Tensor.numpy, torch.Tensor.__array__) and args[0].device.type == "cpu"


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def writes_number(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is ``x[...] = 3``: torch makes a tensor of the host from the number, which is always the same."""
    return function is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor)


def why_between(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, *, numbers: bool = False
) -> str | None:
    """Why a call cannot be inside of a graph, though Python sees nothing new of data by it; None if it can.

    Args:
        device: the one that has graphs.
        numbers: tensors of no dimension are numbers that never change.
    """
    data = args[1:] if function is torch.Tensor.new_tensor else args
    if any(function is known for known in _FROM_PYTHON) and not isinstance((*data, None)[0], torch.Tensor):
        return "copies from Python's memory"
    if function in _INDEXED_BY_PYTHON and device.type != "cpu" and _has_list(args[1]):
        return "copies an index from Python's memory"
    if function in _INDEXED_WRITES and _has_mask(args[1]) and args[2].numel() != 1:
        return "counts a mask on the host"
    if torch_compat.tags_of(function) is None or torch_compat.is_view(function):
        return None
    tensors = [atom for atom in atoms((args, kwargs)) if isinstance(atom, torch.Tensor)]
    looked_at = [tensor for tensor in tensors if not (numbers and tensor.dim() == 0)]
    if any(is_host(tensor, device) for tensor in looked_at) or _is_made_on_host(function, tensors, kwargs, device):
        return "works on memory of the host"
    return None


def _has_list(index: Any) -> bool:
    """Whether an index is a list of numbers, or has one: it becomes a tensor out of sight."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, range)) for part in parts)


def is_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is where no graph works: what is done to it while one is captured is done only once."""
    return tensor.device.type == "cpu" and device.type != "cpu"


def _is_made_on_host(
    function: Any, tensors: Sequence[torch.Tensor], kwargs: dict[str, Any], device: torch.device
) -> bool:
    if device.type == "cpu":
        return False
    place = kwargs.get("device")
    return place.type == "cpu" if place is not None else not tensors and torch_compat.takes_device(function)


def without_waiting_later(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a copy that has happened when it returns: what reads it next may be on another side."""
    if function is _aten.copy_.default:
        args = args[:2]
    return args, {name: False if name == "non_blocking" else value for name, value in kwargs.items()}
