"""How a language model is run: what a user may choose, validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from piecegraph.config import CudagraphMode
from piecegraph.errors import ConfigError
from piecegraph.llm.loader import LoadFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """Rarely needed settings."""

    fuse_linears: bool = True
    """Join the matmuls that share an input (q/k/v, gate/up) where the graph shows it is safe."""
    self_check: bool = True
    """Compare a few logits with those of transformers when the model is loaded, and refuse it if they differ."""
    block_size: int = 16
    """Tokens in a block of the cache."""
    linear_attention: Literal["auto", "fine", "opaque"] = "auto"
    """How layers with a recurrent state are run: their projections in compiled pieces, or each as a whole."""
    latent_cache: bool = True
    """Keep the compressed form of multi-head latent attention."""
    look_ahead: bool | Literal["auto"] = "auto"
    """Launch a decode step before the tokens of the one before it are read; ``"auto"``: on a GPU."""
    graph_device: Literal["auto", "simulated"] = "auto"
    """``"simulated"``: recorded without a GPU, for tests."""
    progress: bool | Literal["auto"] = "auto"
    """Show progress bars; ``"auto"``: if standard error is a terminal."""
    inductor: Mapping[str, Any] = None  # type: ignore[assignment]
    """Settings for Inductor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inductor", dict(self.inductor or {}))
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError("PG101", f"block_size is {self.block_size!r}", why="it must be a positive integer")
        for name, choices in (("linear_attention", ("auto", "fine", "opaque")), ("graph_device", ("auto", "simulated"))):
            if getattr(self, name) not in choices:
                raise ConfigError("PG101", f"{name} is {getattr(self, name)!r}", why=f"it must be one of {choices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMConfig:
    """As the arguments of :class:`piecegraph.LLM`."""

    dtype: torch.dtype | Literal["auto"]
    device: torch.device
    backend: str | Callable[..., Any]
    attention: str
    load_format: LoadFormat
    max_model_len: int | None
    max_num_seqs: int
    max_batch_tokens: int
    memory_fraction: float
    prefix_cache: bool
    capture_sizes: Literal["auto"] | tuple[int, ...]
    cudagraph_mode: CudagraphMode
    seed: int
    options: LLMOptions

    def __post_init__(self) -> None:
        if self.load_format not in ("auto", "dummy"):
            raise _bad("load_format", self.load_format, '"auto" or "dummy"')
        for name in ("max_num_seqs", "max_batch_tokens"):
            if not _is_positive(getattr(self, name)):
                raise _bad(name, getattr(self, name), "a positive integer")
        if self.max_model_len is not None and not (_is_positive(self.max_model_len) and self.max_model_len > 1):
            raise _bad("max_model_len", self.max_model_len, "an integer above 1")
        if not 0 < self.memory_fraction <= 1:
            raise _bad("memory_fraction", self.memory_fraction, "above 0 and at most 1")
        if self.cudagraph_mode not in ("auto", "piecewise", "full", "none"):
            raise _bad("cudagraph_mode", self.cudagraph_mode, '"auto", "piecewise", "full" or "none"')
        sizes = self.capture_sizes
        if sizes != "auto" and not (sizes and all(map(_is_positive, sizes))):
            raise ConfigError("PG102", f"capture_sizes is {sizes!r}", why="it must hold positive integers")


def make_llm_config(
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    capture_sizes: Literal["auto"] | Sequence[int],
    max_num_seqs: int | None,
    max_batch_tokens: int | None,
    memory_fraction: float | None,
    options: Mapping[str, Any] | None,
    **rest: Any,
) -> LLMConfig:
    """Resolve what was left to us by what the machine has."""
    where = _device(device)
    is_gpu = where.type == "cuda"
    seqs = max_num_seqs if max_num_seqs is not None else (256 if is_gpu else 16)
    tokens = max_batch_tokens if max_batch_tokens is not None else max(4096 if is_gpu else 512, seqs)
    return LLMConfig(
        dtype=_dtype(dtype),
        device=where,
        max_num_seqs=seqs,
        max_batch_tokens=tokens,
        memory_fraction=memory_fraction if memory_fraction is not None else (0.9 if is_gpu else 0.25),
        capture_sizes=capture_sizes if capture_sizes == "auto" else tuple(capture_sizes),
        options=_options(options or {}),
        **rest,
    )


def _options(given: Mapping[str, Any]) -> LLMOptions:
    known = {field.name for field in fields(LLMOptions)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            "PG101", f"unknown option {unknown[0]!r}", why=f"known options are {', '.join(sorted(known))}"
        )
    return LLMOptions(**given)


def _device(device: torch.device | str) -> torch.device:
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("PG101", f"device is {device!r}", why=str(error).splitlines()[0]) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("PG101", f"device is {device!r}", why="there is no GPU here", hint='use device="cpu"')
    # Graphs, random numbers and memory all belong to a numbered device.
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def _dtype(dtype: torch.dtype | str) -> torch.dtype | Literal["auto"]:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return "auto"
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise _bad("dtype", dtype, 'a torch dtype, its name, or "auto"')
    return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _bad(name: str, value: Any, must_be: str) -> ConfigError:
    return ConfigError("PG101", f"{name} is {value!r}", why=f"it must be {must_be}")
