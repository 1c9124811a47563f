"""What a function asks of its arguments that a trace answers in one way only.

A trace is made of tensors of no special kind (no gradients, none made in inference mode, no two of them the same), and
with gradients and inference mode off: so it serves calls in all modes. A function that asks for such a thing goes
another way where the answer is another, and nothing in its graph would tell. So its own code is searched for such
questions, and a call for which one of them has another answer runs as it is written. So does every call of a function
that seeds random numbers: a replay would go on with the next ones.
"""

from __future__ import annotations

import dis
import itertools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from piecegraph.base.user_code import is_torchs_or_ours

_Tensors = Sequence[torch.Tensor]


def _is_one_twice(tensors: _Tensors) -> bool:
    return len({id(tensor) for tensor in tensors}) < len(tensors)


def _has_attributes(tensors: _Tensors) -> bool:
    """Those that torch leaves on a tensor are not meant."""
    return any(not name.startswith("_dynamo") for tensor in tensors for name in vars(tensor))


_WRITTEN = "asks how often a tensor was written to"
_SAME = "asks whether two arguments are one"
_READS_MEMORY = "reads the memory of a tensor"
_SEEDS = "seeds random numbers, or asks where they are"
_QUESTIONS: dict[str, tuple[frozenset[str], Callable[[_Tensors], bool]]] = {
    "asks whether gradients are on": (frozenset({"is_grad_enabled"}), lambda _: torch.is_grad_enabled()),
    "asks whether inference mode is on": (
        frozenset({"is_inference_mode_enabled"}),
        lambda _: torch.is_inference_mode_enabled(),
    ),
    "asks whether a tensor was made in inference mode": (
        frozenset({"is_inference"}),
        lambda tensors: any(tensor.is_inference() for tensor in tensors),
    ),
    "asks whether a tensor requires gradients": (
        frozenset({"requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad"}),
        lambda tensors: any(tensor.requires_grad for tensor in tensors),
    ),
    "asks whether a tensor is a parameter or buffer": (
        frozenset({"Parameter", "Buffer", "type", "__class__"}),
        lambda tensors: any(isinstance(each, torch.nn.Parameter | torch.nn.Buffer) for each in tensors),
    ),
    "asks whether a tensor is conjugated or negated": (
        frozenset({"is_conj", "is_neg"}),
        lambda tensors: any(tensor.is_conj() or tensor.is_neg() for tensor in tensors),
    ),
    "asks whether a tensor has attributes of its own": (
        frozenset({"getattr", "hasattr", "vars", "__dict__"}),
        _has_attributes,
    ),
    _WRITTEN: (frozenset(), lambda _: True),  # what is written to may be ours, and not the caller's
    _SAME: (frozenset(), _is_one_twice),
    _READS_MEMORY: (frozenset(), lambda _: True),
    _SEEDS: (
        frozenset(
            {"manual_seed", "manual_seed_all", "set_rng_state", "fork_rng", "initial_seed"}
            | {"get_rng_state", "get_rng_state_all", "set_rng_state_all"}
        ),
        lambda _: True,  # a replay would go on with the next ones
    ),
}
"""What code does, the names by which it does, and whether a call is then another than the trace."""
_SETTINGS: dict[str, Callable[[], object]] = {
    "get_num_threads": torch.get_num_threads,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "cudnn_sdp_enabled": torch.backends.cuda.cudnn_sdp_enabled,
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "deterministic": lambda: torch.backends.cudnn.deterministic,
    "enabled": lambda: (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, torch.backends.opt_einsum.enabled),
}
"""What torch is set to, by the names that code asks for it by. Others may have such a name: then nothing changes."""
_ENVIRONMENT: dict[str, Callable[[], object]] = dict.fromkeys(
    ("environ", "getenv"), lambda: hash(tuple(os.environ.items()))
)
"""The same for environment variables, which a trace has guards for."""
MEMORY = frozenset({"__reduce__", "__getitem__", "__iter__", "_getitem", "tolist"})
"""What storages are read by without an op, as by ``pickle``: functions of ``torch.storage``."""
SEEDING = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})
"""Methods of generators. Others have such names, too, so they are looked for where they are called."""
_VARIABLES = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF")


@dataclass(frozen=True, slots=True)
class Question:
    """What some code asks for."""

    what: str
    where: str
    """Of the first place."""
    setting: str = ""
    """The name of what is not asked of arguments, and has an answer that may change."""
    answer: str = ""
    """That it had when it was planned."""

    @property
    def is_otherwise(self) -> bool:
        """Whether a setting is another one now."""
        return repr((_SETTINGS | _ENVIRONMENT)[self.setting]()) != self.answer

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


def questions_in(codes: Iterable[types.CodeType], *, is_traced: bool = True) -> tuple[Question, ...]:
    """What the user's code among these asks for. That of packages is taken to mean what it says of results."""
    settings = _SETTINGS if is_traced else _SETTINGS | _ENVIRONMENT
    found: dict[str, Question] = {}
    for code in codes:
        if not _is_written_by_user(code.co_filename):
            continue
        names = {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
        place = f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        for name in settings.keys() & names:
            found.setdefault(name, Question(f"asks for {name}", place, name, repr(settings[name]())))
        for what, (asked_by, _) in _QUESTIONS.items():
            is_asked = what in _ASKED_OTHERWISE and any(_ASKED_OTHERWISE[what](code))
            if is_asked or asked_by & names:
                found.setdefault(what, Question(what, place))
    return tuple(found.values())


def reads_by_text(codes: Iterable[types.CodeType]) -> str:
    """The first of the user's functions that reads globals by ``globals()``, of which no trace tells; or empty."""
    named = (code for code in codes if "globals" in code.co_names and _is_written_by_user(code.co_filename))
    return next((code.co_qualname for code in named), "")


def seeds_at(where: str) -> Question:
    """What is said of code that was seen to seed random numbers."""
    return Question(_SEEDS, where)


def reads_memory_at(where: str) -> Question:
    """What is said of code that was seen to read what a storage holds."""
    return Question(_READS_MEMORY, where)


def other_answer(questions: Iterable[Question], tensors: _Tensors) -> str:
    """The first question that a call answers otherwise than the trace; empty if there is none."""
    return next((str(each) for each in questions if _is_other(each, tensors)), "")


def _is_other(question: Question, tensors: _Tensors) -> bool:
    return question.is_otherwise if question.setting else _QUESTIONS[question.what][1](tensors)


def _is_written_by_user(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" not in file and not is_torchs_or_ours(file)


def _compared_objects(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Comparisons of two variables by ``is``."""
    instructions = list(dis.get_instructions(code))
    for *operands, last in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if last.opname == "IS_OP" and all(each.opname in _VARIABLES for each in operands):
            yield last


def _versions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Where the version of a variable is asked for; objects may have an attribute of that name themselves."""
    for before, last in itertools.pairwise(dis.get_instructions(code)):
        is_of_variable = before.opname in _VARIABLES and before.argval not in ("self", "cls")
        if last.opname == "LOAD_ATTR" and last.argval == "_version" and is_of_variable:
            yield last


_ASKED_OTHERWISE: dict[str, Callable[[types.CodeType], Iterator[dis.Instruction]]] = {
    _SAME: _compared_objects,
    _WRITTEN: _versions,
}
"""What is asked by no name of its own."""
