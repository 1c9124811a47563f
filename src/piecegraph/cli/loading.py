"""Which language model a command runs, and where: the options that commands share, and what ``auto`` means in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from piecegraph.llm.llm import LLM

Command = TypeVar("Command", bound=Callable[..., Any])

_MOST_AT_ONCE_GPU, _MOST_AT_ONCE_CPU = 256, 16
"""Prompts that run together; the others wait."""

_OPTIONS = (
    click.option("--dtype", default="auto", show_default=True, help="Of weights and cache, such as bfloat16."),
    click.option(
        "--device", default="auto", show_default=True, help="Such as cuda:1 or cpu; auto: a GPU if there is one."
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "inductor", "eager"]),
        default="auto",
        show_default=True,
        help="What compiles the pieces; auto: inductor on a GPU; eager on a CPU, where compiling takes half a minute.",
    ),
)


def model_options(command: Command) -> Command:
    """``--dtype``, ``--device`` and ``--backend``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def ranks_option(command: Command) -> Command:
    """``--tensor-parallel-size``."""
    help_text = "Processes of a model; a job with more has replicas.  [all of torchrun's]"
    return click.option("--tensor-parallel-size", metavar="N", type=click.IntRange(min=1), help=help_text)(command)


def num_ranks() -> int:
    """How many processes ``torchrun`` has started for this command; 0 if it was started by itself."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def this_rank() -> int:
    """Which of them this is."""
    return int(os.environ["RANK"]) if num_ranks() else 0


def shared(device: str, tensor_parallel_size: int | None) -> dict[str, int]:
    """Arguments of a model that all processes of this command run together, or of several."""
    if not num_ranks():
        return {} if tensor_parallel_size is None else {"tensor_parallel_size": tensor_parallel_size}
    from piecegraph.llm.ranks.group import start_job

    start_job("cuda" if is_gpu(device) else "cpu")  # also for one process, which then goes the way of several
    size = tensor_parallel_size or num_ranks()
    return {"tensor_parallel_size": size, "data_parallel_size": num_replicas(size)}


def num_replicas(tensor_parallel_size: int | None) -> int:
    """How many models a job of ``torchrun`` has. A size that does not divide it is refused when they are loaded."""
    return max(1, num_ranks() // (tensor_parallel_size or max(1, num_ranks())))


def is_gpu(device: str) -> bool:
    """Whether a value of ``--device`` means a GPU."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def load_model(model: str, *, num_prompts: int, device: str, backend: str, **how: Any) -> LLM:
    """Load a model; no more is cached and recorded than that many prompts can use."""
    import piecegraph  # from there importing is timed

    on_gpu = is_gpu(device)
    chosen = ("inductor" if on_gpu else "eager") if backend == "auto" else backend
    at_once = min(num_prompts, _MOST_AT_ONCE_GPU if on_gpu else _MOST_AT_ONCE_CPU)
    return piecegraph.LLM(model, device=device, backend=chosen, max_num_seqs=at_once, **how)
