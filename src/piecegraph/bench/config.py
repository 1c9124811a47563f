"""What is to be measured: validated, with everything that was left to us resolved and told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from piecegraph.base.plan import Decision
from piecegraph.bench import shapes
from piecegraph.bench.result import Mode
from piecegraph.errors import ConfigError

MODES: tuple[Mode, ...] = get_args(Mode)
COMPILE_MODES: dict[Mode, str] = {"compile": "default", "reduce-overhead": "reduce-overhead"}
"""As ``torch.compile`` calls them."""
PEER_MODES: tuple[Mode, ...] = ("eager", *COMPILE_MODES)
"""Modes that are not ours: they share the weights of one model."""

WARM_UPS = 2
"""Rounds that are not counted."""
REPEATS = 7

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One size of a sweep."""

    batch_size: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"batch {self.batch_size}, {self.input_len} + {self.output_len} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A sweep over one model."""

    model: str
    """A shape, a folder, a name that transformers can find; or ``pkg.mod:factory``."""
    is_module: bool = False
    """Whether the model is a factory of any module."""
    batch_sizes: tuple[int, ...]
    input_lens: tuple[int, ...]
    output_len: int
    modes: tuple[Mode, ...]
    repeats: int = REPEATS
    load_format: LoadFormat
    dtype: torch.dtype | Literal["auto"] = "auto"
    device: torch.device
    tensor_parallel_size: int = 1
    num_replicas: int = 1
    """Models of so many ranks each that measure the same at once."""
    graph_device: Literal["auto", "simulated"] = "auto"
    """``"simulated"``: graphs are recorded without a GPU, for tests."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(
            Cell(batch_size, input_len, self.output_len)
            for batch_size in self.batch_sizes
            for input_len in self.input_lens
        )

    @property
    def has_graphs(self) -> bool:
        return self.device.type == "cuda" or self.graph_device == "simulated"

    def why_not(self, mode: Mode) -> str:
        """Why there is no such mode here; empty if there is."""
        if mode == "full" and not self.has_graphs:
            return "a CPU has no graphs: what would run is what piecewise runs"
        if mode == "reduce-overhead" and self.device.type != "cuda":
            return "a CPU has no graphs: what would run is what compile runs"
        if mode in PEER_MODES and self.tensor_parallel_size > 1:
            return "each rank would run the whole model; the other modes were compared with it"
        return ""


def resolve(
    model: str,
    *,
    is_module: bool = False,
    batch_sizes: tuple[int, ...] = (),
    input_lens: tuple[int, ...] = (),
    output_len: int | None = None,
    modes: tuple[str, ...] = (),
    load_format: LoadFormat = "auto",
    dtype: str = "auto",
    device: str = "auto",
    tensor_parallel_size: int | None = None,
    **rest: Any,
) -> tuple[BenchConfig, tuple[Decision, ...]]:
    """What will run, and each of its settings with the reason for it. What is empty is left to us."""
    where = _device(device)
    has_gpu = where.type == "cuda"
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    config = BenchConfig(
        model=model,
        is_module=is_module,
        batch_sizes=_sizes("--batch-size", batch_sizes) or ((1, 8, 64) if has_gpu else (4,)),
        input_lens=_sizes("--input-len", input_lens) or ((128, 1024) if has_gpu else (64,)),
        output_len=output_len or (32 if has_gpu else 16),
        modes=_modes(modes),
        load_format="dummy" if model in shapes.NAMES and not is_module else load_format,
        dtype=_dtype(dtype),
        device=where,
        tensor_parallel_size=tensor_parallel_size or num_processes,
        num_replicas=max(1, num_processes // (tensor_parallel_size or num_processes)),
        **rest,
    )
    if config.output_len < 2:
        raise ConfigError("PG101", f"--output-len is {config.output_len}", why="a step of decoding needs two tokens")
    given = {"device": device != "auto", "batch sizes": batch_sizes, "input lengths": input_lens}
    given |= {"output length": output_len, "modes": modes}
    return config, _decisions(config, {name for name, value in given.items() if value})


def _decisions(config: BenchConfig, given: set[str]) -> tuple[Decision, ...]:
    """What will be measured; those that were not given were left to us."""
    size = "for a GPU" if config.device.type == "cuda" else "small, for a CPU"
    settings = [
        ("device", str(config.device), "found"),
        ("batch sizes", _listed(config.batch_sizes), size),
        ("input lengths", _listed(config.input_lens), size),
        *(() if config.is_module else (("output length", str(config.output_len), size),)),
        ("modes", _listed(config.modes), "all"),
    ]
    found = [Decision("model", config.model, _about_model(config))]
    found += [Decision(name, value, "asked for" if name in given else reason) for name, value, reason in settings]
    turns = f"in turns of the modes, behind {WARM_UPS} that are not counted"
    found.append(Decision("repeats", str(config.repeats), turns))
    if config.tensor_parallel_size > 1:
        found.append(Decision("ranks", str(config.tensor_parallel_size), "the model is split over them"))
    if config.num_replicas > 1:
        why = "each runs the whole load at once with the others; figures are of the first"
        found.append(Decision("replicas", str(config.num_replicas), why))
    return tuple(found)


def _device(name: str) -> torch.device:
    """What was asked for; else the GPU of this rank among those of its machine, if there is one."""
    try:
        found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError("PG101", f"--device is {name!r}", why=str(error).splitlines()[0]) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("PG101", f"--device is {name!r}", why="there is no GPU here", hint="--device cpu")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return found


def _about_model(config: BenchConfig) -> str:
    if config.is_module:
        return "made by a factory"
    if config.load_format == "dummy":
        return "random weights of a built-in shape" if config.model in shapes.NAMES else "random weights"
    return "weights of its checkpoint"


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


def _sizes(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if any(size < 1 for size in sizes):
        raise ConfigError("PG101", f"{name} is {_listed(sizes)}", why="sizes are positive integers")
    return tuple(dict.fromkeys(sizes))


def _dtype(name: str) -> torch.dtype | Literal["auto"]:
    found = getattr(torch, name, None)
    if name == "auto" or isinstance(found, torch.dtype):
        return found if isinstance(found, torch.dtype) else "auto"
    raise ConfigError("PG101", f"--dtype is {name!r}", why="there is no such type", hint="bfloat16, for example")


def _modes(names: tuple[str, ...]) -> tuple[Mode, ...]:
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise ConfigError("PG101", f"{unknown[0]!r} is no mode", hint=f"modes: {_listed(MODES)}")
    # The baseline comes first, whatever the order they were written in.
    return tuple(mode for mode in MODES if not names or mode in names)
