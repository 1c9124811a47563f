"""What a thread is in: dispatch modes, inference mode, autocast, profilers, and where random numbers are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def add_modes(function_mode: Any, dispatch_mode: Any, *, innermost: bool) -> None:
    """Put a pair of modes on this thread's stacks, innermost or outermost.

    Not by entering them: leaving must be the reverse of entering then, and torch.compile would refuse to compile.
    """
    functions, others = _function_modes(), _dispatch_modes()
    _set_function_modes([function_mode, *functions] if innermost else [*functions, function_mode])
    _set_dispatch_modes([dispatch_mode, *others] if innermost else [*others, dispatch_mode])


def remove_modes(function_mode: Any, dispatch_mode: Any) -> None:
    """Take a pair of modes off this thread's stacks, wherever in them it is."""
    _set_function_modes([mode for mode in _function_modes() if mode is not function_mode])
    _set_dispatch_modes([mode for mode in _dispatch_modes() if mode is not dispatch_mode])


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _set_function_modes(modes: Sequence[Any]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _dispatch_modes() -> list[Any]:
    """Without those of torch's own machinery (fakes, proxies), which have places of their own."""
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


def _set_dispatch_modes(modes: Sequence[Any]) -> None:
    for _ in range(len(_dispatch_modes())):
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


class WatchingMode(TorchDispatchMode):
    """A mode that looks at ops and leaves them what they are.

    It is shown ops that call functions, too, such as ``torch.cond``. And what torch compiles while it is on is compiled
    as ever: torch would mark the code of a function that was called under a mode, which is never compiled again then,
    and ``torch.cond`` cannot run so.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # torch 2.13; earlier versions do not ask
        return True


@contextlib.contextmanager
def shown_ops(mode: WatchingMode) -> Iterator[None]:
    """A mode is on inside. Not by entering it: that tells earlier versions of torch that nothing can be compiled."""
    _set_dispatch_modes([*_dispatch_modes(), mode])
    try:
        yield
    finally:
        _set_dispatch_modes([each for each in _dispatch_modes() if each is not mode])


class _Parts(WatchingMode):
    """Hands every op of this thread to a function."""

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


class WholeOps:
    """Which ops a dispatch mode is shown that are made of others, and not those.

    Autograd's keys take such ops apart before any mode sees them. Tensors of inference mode do not have these keys, and
    inside of it no tensor does: ``bool(x)`` is one ``aten.is_nonzero`` then, which has no tag that says it reads.

    What is known of an op is kept, as torch takes long to tell; so for one run, as anybody may register kernels.
    """

    def __init__(self) -> None:
        self._are_made_of_others: dict[Any, bool] = {}

    def has(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is one of such an op."""
        if not isinstance(target, OpOverload):
            return False
        is_made_of_others = self._are_made_of_others.get(target)
        if is_made_of_others is None:
            is_made_of_others = self._are_made_of_others[target] = _is_made_of_others(target)
        if not is_made_of_others:
            return False
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return all(t.layout is torch.strided and not t.is_nested and not t.is_quantized for t in tensors)


def _is_made_of_others(op: OpOverload) -> bool:
    if not _has_kernel(op, "CompositeImplicitAutograd"):
        return False
    # Autograd's keys leave these as they are, too.
    return not any(_has_kernel(op, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd"))


def _has_kernel(op: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def run_parts(
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an op of :class:`WholeOps`, and have ``run`` called for each op that it is made of.

    Not by ``op.decompose()``: that prefers decompositions in Python, and the one of ``dropout`` draws other numbers.
    """
    with shown_ops(_Parts(run)):
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Inside, no mode sees which functions of torch are called."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def is_profiling() -> bool:
    """Whether a profiler runs, in any thread: a second one would fail, or end the process."""
    return bool(torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())


is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` writes down what is called."""

transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""How deep in ``vmap``, ``grad`` and the like of ``torch.func`` a call is; None outside of them."""

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see every op of this thread: a counter of FLOPs, ``make_fx``."""


def dispatch_modes() -> list[Any]:
    """Those modes."""
    return [torch._C._get_dispatch_stack_at(number) for number in range(num_dispatch_modes())]


num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes see every function of torch that this thread calls."""


def watching_modes() -> list[Any]:
    """Modes that see every function or op, but for those that choose a device for what is made without one."""
    return [*(mode for mode in _function_modes() if not isinstance(mode, DeviceContext)), *dispatch_modes()]


def default_devices() -> tuple[str, ...]:
    """What ``torch.set_default_device`` and ``with torch.device(...)`` have chosen, innermost last."""
    return tuple(str(mode.device) for mode in _function_modes() if isinstance(mode, DeviceContext))


_precision_of = torch._C._get_fp32_precision_getter  # the public ones raise where old and new names were used to set it
SWITCHES: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch._C._get_deterministic_algorithms,
    functools.partial(_precision_of, "cuda", "matmul"),
    functools.partial(_precision_of, "cuda", "conv"),
    functools.partial(_precision_of, "mkldnn", "matmul"),
)
"""Torch's own, for all that runs: with another, what was traced or captured would be something else."""

is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device; asking for each takes four times as long."""


@contextlib.contextmanager
def as_in_a_new_thread() -> Iterator[None]:
    """Without what a caller has chosen for code of its own: inference mode, autocast, a default device."""
    with contextlib.ExitStack() as chosen:
        if torch.is_inference_mode_enabled():
            chosen.enter_context(torch.inference_mode(False))
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            chosen.enter_context(torch.autocast(kind, enabled=False))
        if default_devices():
            chosen.enter_context(torch.device("cpu"))
        yield


def serving() -> contextlib.AbstractContextManager[Any]:
    """Inference mode, and otherwise :func:`as_in_a_new_thread`; nearly always there is nothing else to leave."""
    return _serving_alone() if is_any_autocast() or num_function_modes() else torch.inference_mode()


@contextlib.contextmanager
def _serving_alone() -> Iterator[None]:
    with as_in_a_new_thread(), torch.inference_mode():
        yield


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Grad off, inference mode off: what is traced, allocated or recorded inside serves calls in both modes."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def inference_as(tensor: torch.Tensor) -> Iterator[None]:
    """Grad off, inference mode as when a tensor was made.

    What it is to have as its data, ``tensor.data = ...``, must be made in it, or no op takes the tensor any more.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        yield


@contextlib.contextmanager
def without_trace(devices: Iterable[torch.device]) -> Iterator[None]:
    """As :func:`outside_inference`, and :func:`drawn_again`."""
    with outside_inference(), drawn_again(devices):
        yield


@contextlib.contextmanager
def drawn_again(devices: Iterable[torch.device]) -> Iterator[None]:
    """Random numbers drawn inside are drawn again afterwards: those of the CPU, of these devices and of the current
    one, where a function of no tensors makes some, and those of all generators that were noted.
    """
    saved = [(generator, generator.get_state()) for generator in _noted_generators.values()]
    try:
        with torch.random.fork_rng(_cuda_indices(devices)):
            yield
    finally:
        for generator, state in saved:
            generator.set_state(state)


def generator_id(generator: torch.Generator) -> int:
    """The same for every object that stands for one generator: ops are shown new ones."""
    return int(generator._cdata)  # type: ignore[attr-defined]


_noted_generators: dict[int, torch.Generator] = {}
"""For good: there are few, and torch 2.11 knows no weak references to them."""


def note_generator(generator: torch.Generator) -> None:
    """A call was seen to draw from a generator of the user's: from now on it is put back as those of devices are."""
    _noted_generators.setdefault(generator_id(generator), generator)


def random_states(devices: Iterable[torch.device]) -> list[bytes]:
    """Where the random number generators of the CPU and of these devices are, and those that were noted: equal if
    nothing was drawn between.
    """
    noted = [generator.get_state() for generator in _noted_generators.values()]
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _cuda_indices(devices)), *noted]
    return [bytes(state.tolist()) for state in states]


def _cuda_indices(devices: Iterable[torch.device]) -> list[int]:
    current = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return sorted({*current, *(device.index for device in devices if device.type == "cuda")})
