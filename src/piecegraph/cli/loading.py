"""Which language model a command runs, and where: the options that commands share, and what ``auto`` means in them."""

from __future__ import annotations

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
