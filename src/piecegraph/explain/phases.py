"""Where in its life a run was: milestones in what engines print, and layers in a stack."""

from __future__ import annotations

import re
from collections.abc import Iterable

from piecegraph.explain.evidence import Frame, Milestone, Phase

PHASES: tuple[Phase, ...] = ("init", "load", "kv cache", "compile", "capture", "serve")
"""In the order in which a healthy start passes them."""

_MARKS: tuple[tuple[Phase, str, str], ...] = (
    ("init", "begun", r"Init torch distributed begin|Initializing an? (?:V1 )?LLM engine"
                      r"|vLLM API server version|server_args=ServerArgs"),
    ("init", "done", r"Init torch distributed ends|rank \d+ in world size \d+ is assigned as"),
    ("load", "begun", r"Load weight begin|Starting to load model|Loading (?:safetensors )?checkpoint shards:\s+0%"),
    ("load", "done", r"Load weight end|Loading weights took|Model loading took|checkpoint shards: 100%"),
    ("kv cache", "done", r"KV Cache is allocated|Memory pool end|GPU KV cache size:|# GPU blocks:"),
    ("compile", "begun", r"Using cache directory: \S+ for vLLM's torch\.compile|Dynamo bytecode transform time"),
    ("compile", "done", r"torch\.compile takes [\d.]+ s in total"),
    ("capture", "begun", r"Capture cuda graph b|Capturing (?:batches|CUDA graph|cudagraph)"),
    ("capture", "done", r"Capture cuda graph end|Graph capturing finished"),
    ("serve", "begun", r"The server is fired up|Application startup complete|Uvicorn running on|Prefill batch"
                       r"|Engine 0\d\d: Avg prompt"),
)  # fmt: skip
_MARK = re.compile("|".join(f"(?P<m{number}>{pattern})" for number, (_, _, pattern) in enumerate(_MARKS)))
MARK_WORDS = (
    *(" distributed ", "LLM engine", "API server", "ServerArgs", "world size", "eight", "load model", "loading took"),
    *("shards:", "ache", "Memory pool", "GPU blocks", "torch.compile", "Dynamo bytecode", "apturing", "Capture cuda"),
    *("fired up", "startup complete", "Uvicorn", "Prefill batch", "Avg prompt"),
)
"""Every milestone holds one of these: see :data:`piecegraph.explain.log.observations.WORDS`."""
_SIZE = re.compile(r"\b(?:bs=\d+|num_tokens=\d+)|\bbs \[(?P<one>\d+)\]|batch size (?P<size>\d+)")

_LAYERS: tuple[tuple[str, Phase | None, str], ...] = (
    ("CUDA graph capture", "capture", r"cuda_graph_runner\.py|cudagraph_utils|torch/cuda/graphs\.py|cuda_graph\.py"
                                      r"|graph_runner\.py"),
    ("Dynamo", "compile", r"torch/_dynamo/"),
    ("thunder", "compile", r"/thunder/"),
    ("Inductor", "compile", r"torch/_inductor/"),
    ("AOTAutograd", "compile", r"torch/_functorch/"),
    ("FX tracing", "compile", r"torch/fx/"),
    ("Triton", "compile", r"/triton/"),
    ("weight loading", "load", r"model_loader|weight_utils|safetensors/|transformers/modeling_utils"),
    ("process group", "init", r"parallel_state\.py|torch/distributed/(?:distributed_c10d|rendezvous)"),
    ("KV cache", "kv cache", r"memory_pool\.py|kv_cache_\w+\.py|kv_cache\.py|:determine_available_memory|:profile_run"
                             r"|:init_memory_pool|:initialize_kv_cache"),
)  # fmt: skip
_COMPILED_LAYERS = tuple((name, phase, re.compile(pattern)) for name, phase, pattern in _LAYERS)


def milestone_of(text: str, line: int | None) -> Milestone | None:
    """What a line says was begun or done.

    >>> milestone_of("Capturing batches (bs=1 avail_mem=12.33 GB):   0%", 115).size
    'bs=1'
    """
    found = _MARK.search(text)
    if found is None:
        return None
    assert found.lastgroup is not None
    phase, state, _ = _MARKS[int(found.lastgroup[1:])]
    size = _SIZE.search(text)
    shown = (f"bs={size['one'] or size['size']}" if size["one"] or size["size"] else size[0]) if size else ""
    return Milestone(phase, "done" if state == "done" else "begun", found[0], line, shown if phase == "capture" else "")


def layers_of(frames: Iterable[Frame]) -> tuple[str, ...]:
    """The layers a stack goes through, outermost first, each once."""
    found = dict.fromkeys(name for frame in frames if (name := _layer(frame)[0]))
    return tuple(found)


def phase_of(frames: Iterable[Frame]) -> Phase | None:
    """The phase that a stack is in; a compile that a capture starts belongs to the capture."""
    found = {_layer(frame)[1] for frame in frames}
    order: tuple[Phase, ...] = ("capture", "kv cache", "load", "compile", "init")
    return next((phase for phase in order if phase in found), None)


def _layer(frame: Frame) -> tuple[str, Phase | None]:
    where = f"{frame.file}:{frame.function}"
    return next(((name, phase) for name, phase, pattern in _COMPILED_LAYERS if pattern.search(where)), ("", None))
