"""How a language model is run: what a user may choose, validated."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from piecegraph.base.coerce import as_integer, as_list, as_real
from piecegraph.base.config import CudagraphMode, GraphDeviceName, check_folder
from piecegraph.errors import ConfigError
from piecegraph.llm.model.loader import LoadFormat
from piecegraph.llm.ranks.group import local_device
from piecegraph.llm.run.arguments import unknown_argument

_OTHER_NAMES = {
    "torch_dtype": "dtype",
    "gpu_memory_utilization": "memory_fraction",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_prefix_caching": "prefix_cache",
    "enforce_eager": 'cudagraph_mode="none"',
    "tp_size": "tensor_parallel_size",
    "dp_size": "data_parallel_size",
}
"""What other libraries call ours."""


_SWITCHES = (
    "fuse_linears",
    "fuse_gates",
    "self_check",
    "latent_cache",
    "full_steps",
    "provenance",
    "cache",
    "dump_inputs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """Rarely needed settings."""

    fuse_linears: bool = True
    """Join the matmuls that share an input (q/k/v, gate/up) where the graph shows it is safe."""
    fuse_gates: bool = True
    """On a Hopper GPU, in half precision: compute the SiLU of a gate and the product behind it where the sums of their
    linear are made.
    """
    decode_pieces: bool | Literal["auto"] = "auto"
    """Steps of decoding with up to 64 sequences run pieces of their own, in which norms, activations and residuals are
    part of linears, and kernels begin early; ``"auto"``: on a GPU, in half precision.
    """
    self_check: bool = True
    """Compare a few logits with those of transformers when the model is loaded, and refuse it if they differ."""
    block_size: int | Literal["auto"] = "auto"
    """Tokens in a block of the cache, in whole blocks of which a prefix is found again; ``"auto"``: what suits the
    attention kernel best.
    """
    cache_tokens: int | Literal["auto"] = "auto"
    """Tokens that the cache holds at most, for each kind of layer; ``"auto"``: what can be used and memory allows."""
    linear_attention: Literal["auto", "fine", "opaque"] = "auto"
    """How layers with a recurrent state are run: their projections in compiled pieces, or each as a whole."""
    latent_cache: bool = True
    """Keep the compressed form of multi-head latent attention."""
    look_ahead: bool | Literal["auto"] = "auto"
    """Launch a step before the tokens of the one before it are read; ``"auto"``: on a GPU."""
    full_steps: bool = True
    """While requests wait for a place, cut prompts so that steps are of recorded sizes, without padding."""
    num_threads: int | Literal["auto"] = "auto"
    """Of a CPU, for each step; ``"auto"``: the number that is quickest, up to what torch is set to."""
    record_seconds: float | Literal["auto"] = "auto"
    """How long sizes of steps are recorded when the model is loaded, beyond those that always are; 0: none beyond
    those. ``"auto"``: 1.5 seconds on a GPU without provenance, otherwise 0."""
    one_shot_bytes: int = 128 * 1024
    """Of several ranks with NVLink between them: sums of up to so many bytes are made by one kernel, larger ones by
    NCCL. 0: all of them by NCCL.
    """
    provenance: bool = False
    """Write down which line of the model put which kernels into the graphs, for ``trace()`` and ``kernels``."""
    graph_device: GraphDeviceName = "auto"
    """``"simulated"``: recorded without a GPU, for tests."""
    cache: bool = True
    """Keep what was traced and compiled on disk; see docs/cache.md."""
    progress: bool | Literal["auto"] = "auto"
    """Show progress bars; ``"auto"``: if standard error is a terminal."""
    inductor: Mapping[str, Any] = None  # type: ignore[assignment]
    """Settings for Inductor."""
    dump: str | os.PathLike[str] | None = None
    """A folder to leave graphs, pieces, repros and an index in; see :func:`piecegraph.dump`."""
    dump_inputs: bool = False
    """Save the tensors that go into each distinct piece there, too."""

    def __post_init__(self) -> None:
        if self.inductor is not None and not isinstance(self.inductor, Mapping):
            raise _bad("options['inductor']", self.inductor, "a dictionary")
        object.__setattr__(self, "inductor", dict(self.inductor or {}))
        for name in ("block_size", "cache_tokens", "num_threads"):
            if not _is_auto(getattr(self, name)):
                count = _positive(f"options[{name!r}]", getattr(self, name), 'a positive integer or "auto"')
                object.__setattr__(self, name, count)
        if not _is_auto(self.record_seconds):
            object.__setattr__(self, "record_seconds", _seconds("options['record_seconds']", self.record_seconds))
        object.__setattr__(self, "one_shot_bytes", _bytes("options['one_shot_bytes']", self.one_shot_bytes))
        if self.dump is not None:
            check_folder("options['dump']", self.dump)
        for name in _SWITCHES:
            _check_choice(f"options[{name!r}]", getattr(self, name), (True, False))
        for name in ("look_ahead", "progress", "decode_pieces"):
            _check_choice(f"options[{name!r}]", getattr(self, name), (True, False, "auto"))
        _check_choice("options['linear_attention']", self.linear_attention, ("auto", "fine", "opaque"))
        _check_choice("options['graph_device']", self.graph_device, get_args(GraphDeviceName))


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
    deterministic: bool
    tensor_parallel_size: int
    data_parallel_size: int
    seed: int
    options: LLMOptions

    def __post_init__(self) -> None:
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        _check_choice("cudagraph_mode", self.cudagraph_mode, get_args(CudagraphMode))
        _check_choice("prefix_cache", self.prefix_cache, (True, False))
        if self.deterministic and self.capture_sizes != "auto":
            why = "with deterministic=True every step is of one size, max_batch_tokens"
            raise ConfigError("PG101", f"capture_sizes is {list(self.capture_sizes)!r}", why=why)
        if isinstance(self.backend, str):
            _check_choice("backend", self.backend, ("inductor", "eager"))
        elif not callable(self.backend):
            raise _bad("backend", self.backend, '"inductor", "eager" or a callable')
        if self.max_batch_tokens < self.max_num_seqs:
            raise _bad("max_batch_tokens", self.max_batch_tokens, f"at least max_num_seqs ({self.max_num_seqs})")


def make_llm_config(
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    capture_sizes: Literal["auto"] | Sequence[int],
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_batch_tokens: int | None,
    memory_fraction: float | None,
    deterministic: bool,
    tensor_parallel_size: int,
    data_parallel_size: int,
    seed: int,
    options: Mapping[str, Any] | None,
    **rest: Any,
) -> LLMConfig:
    """Resolve what was left to us by what the machine has."""
    num_ranks = _positive("tensor_parallel_size", tensor_parallel_size)
    num_replicas = _positive("data_parallel_size", data_parallel_size)
    where = _device(device) if num_ranks * num_replicas == 1 else _device_of_rank(device)
    is_gpu = where.type == "cuda"
    _check_choice("deterministic", deterministic, (True, False))
    default_seqs, default_tokens = (256, 4096) if is_gpu else (16, 512)
    if deterministic:  # every step pays for as many tokens as the largest
        default_tokens = default_seqs
    seqs, tokens = _batch(max_num_seqs, max_batch_tokens, default_seqs, default_tokens)
    return LLMConfig(
        dtype=_dtype(dtype),
        device=where,
        max_model_len=_length(max_model_len),
        max_num_seqs=seqs,
        max_batch_tokens=tokens,
        memory_fraction=_fraction(memory_fraction if memory_fraction is not None else (0.9 if is_gpu else 0.25)),
        capture_sizes=_sizes(capture_sizes),
        deterministic=deterministic,
        tensor_parallel_size=num_ranks,
        data_parallel_size=num_replicas,
        seed=_seed(seed),
        options=_options(options if options is not None else {}),
        **rest,
    )


def refuse_names(given: Mapping[str, Any]) -> None:
    """Raise if there are arguments that :class:`piecegraph.LLM` does not have."""
    if not given:
        return
    options = {field.name: f"options={{{field.name!r}: ...}}" for field in fields(LLMOptions)}
    known = {field.name for field in fields(LLMConfig)}
    raise unknown_argument(min(given), known, _OTHER_NAMES | options)


def check_path(path: Any) -> str:
    """The path of a model as text. Whether something is there is seen when it is read."""
    if isinstance(path, torch.nn.Module):
        why = "it must be a folder with a model, or a name that transformers can find"
        hint = "give the folder that its save_pretrained writes; piecegraph.compile takes modules"
        raise ConfigError("PG101", f"path is a {type(path).__name__}", why=why, hint=hint)
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(found, str) or not found:
        raise _bad("path", path, 'a folder with a model, a name that transformers can find, or "demo"')
    return found


def _batch(seqs: Any, tokens: Any, default_seqs: int, default_tokens: int) -> tuple[int, int]:
    """How many sequences and tokens a step has at most. There are never more sequences than tokens."""
    num_tokens = None if tokens is None else _positive("max_batch_tokens", tokens)
    num_seqs = min(default_seqs, num_tokens or default_seqs) if seqs is None else _positive("max_num_seqs", seqs)
    return num_seqs, max(default_tokens, num_seqs) if num_tokens is None else num_tokens


def _length(given: Any) -> int | None:
    found = as_integer(given)
    if given is not None and (found is None or found < 2):
        raise _bad("max_model_len", given, "an integer above 1")
    return found


def _fraction(given: Any) -> float:
    found = as_real(given)
    if found is None or not 0 < found <= 1:
        raise _bad("memory_fraction", given, "a number above 0 and at most 1")
    return found


def _seed(given: Any) -> int:
    found = as_integer(given)
    if found is None:
        raise _bad("seed", given, "an integer")
    return found


def _sizes(given: Any) -> Literal["auto"] | tuple[int, ...]:
    if _is_auto(given):
        return "auto"
    listed = as_list(given) or []
    sizes = tuple(size for each in listed if (size := as_integer(each)) is not None and size > 0)
    if not sizes or len(sizes) < len(listed):
        raise ConfigError("PG102", f"capture_sizes is {given!r}", why='it must be "auto" or hold positive integers')
    return sizes


def _options(given: Any) -> LLMOptions:
    if not isinstance(given, Mapping):
        raise _bad("options", given, "a dictionary")
    known = {field.name for field in fields(LLMOptions)}
    unknown = sorted(set(given) - known, key=str)
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(sorted(known))}"
        raise ConfigError("PG101", f"unknown option {unknown[0]!r}", hint=hint)
    return LLMOptions(**given)


def _device(device: torch.device | str) -> torch.device:
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("PG101", f"device is {device!r}", why=str(error).splitlines()[0]) from error
    if found.type not in ("cpu", "cuda"):
        raise _bad("device", device, '"auto", "cpu" or a CUDA device')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("PG101", f"device is {device!r}", why="there is no GPU here", hint='use device="cpu"')
    if found.index is not None and found.type == "cuda" and found.index >= torch.cuda.device_count():
        raise ConfigError("PG101", f"device is {device!r}", why=f"there are {torch.cuda.device_count()} GPUs here")
    # Graphs, random numbers and memory all belong to a numbered device.
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def _device_of_rank(device: torch.device | str) -> torch.device:
    """Where one of several ranks runs: each has a GPU of its own."""
    found = _device(device)
    if found.type != "cuda":
        return found
    own = local_device()
    if device not in ("auto", "cuda", torch.device("cuda")) and found != own:
        why = f"this rank has the GPU of its number on its machine, {own}"
        raise ConfigError("PG101", f"device is {device!r}", why=why, hint='use device="cuda"')
    return _device(own)


def _dtype(dtype: torch.dtype | str) -> torch.dtype | Literal["auto"]:
    if dtype == "auto":
        return "auto"
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if found not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise _bad("dtype", dtype, '"auto", bfloat16, float16, float32 or float64')
    return found


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _positive(name: str, value: Any, must_be: str = "a positive integer") -> int:
    found = as_integer(value)
    if found is None or found < 1:
        raise _bad(name, value, must_be)
    return found


def _seconds(name: str, value: Any) -> float:
    found = as_real(value)
    if found is None or not found >= 0:
        raise _bad(name, value, 'a number that is not negative, or "auto"')
    return found


def _bytes(name: str, value: Any) -> int:
    found = as_integer(value)
    if found is None or found < 0 or found % 16:
        raise _bad(name, value, "a multiple of 16 that is not negative")
    return found


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise _bad(name, value, f"one of {', '.join(map(repr, choices))}")


def _bad(name: str, value: Any, must_be: str) -> ConfigError:
    return ConfigError("PG101", f"{name} is {value!r}", why=f"it must be {must_be}")
