"""What the place of a frame says: whose code it is in, and in which layer and phase of a run.

Ownership goes by the package's name first and by the path second, because torch may be a source checkout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from piecegraph.explain.evidence import Frame, Phase

CodeOwner = Literal["python", "library", "engine", "user"]


class FramePlace(NamedTuple):
    """A file as people speak of it."""

    owner: CodeOwner
    package: str
    path: str
    """From the package on: ``torch/fx/proxy.py``."""
    is_installed: bool
    """Whether it lies in site-packages."""


_ENGINES = frozenset(
    "sglang vllm thunder tensorrt_llm lmdeploy megatron deepspeed nemo fairseq trl verl axolotl".split()
)
"""The code at work: shown, like the user's."""
_LIBRARIES = frozenset(
    "torch triton transformers flashinfer flash_attn xformers accelerate safetensors tokenizers huggingface_hub numpy "
    "ray sgl_kernel cutlass apex torchvision torchaudio torchao bitsandbytes peft diffusers nvidia cuda mpi4py "
    "pydantic uvicorn fastapi starlette zmq nvfuser jax".split()
)
_TORCH_PARTS = re.compile(
    r"torch/(?:_|nn/|fx/|cuda/|utils/|distributed/|autograd/|optim/|functional|multiprocessing/|ops/|library|serialization"
    r"|tensor|jit/|backends/|storage|hub|export/|compiler/|amp/|onnx/|profiler/|overrides)"
)
"""A folder of the user may be called torch."""
_SITE = re.compile(r"(?:^|/)(?:site|dist)-packages/(?P<path>(?P<package>[^/]+).*)$")
_STANDARD = re.compile(
    r"(?:^|/)lib/python3\.\d+/(?P<path>.+)$|^<frozen (?P<frozen>[^>]+)>$"
    r"|^[A-Za-z]:/(?:.*/)?(?i:python\d*|\w*conda\d*|miniforge\d*|envs/[^/]+)/(?i:lib)/(?P<windows>.+)$"
    r"|(?:^|/)bin/(?P<script>[\w+-]+)$"
)
"""Python's own: its library, and what an installer puts into bin to start a package."""
_ENVIRONMENT = frozenset(("bin", "lib", "lib64", "Lib", "Scripts"))
"""What lies in an environment, which people call like the package it is for."""

_LAYERS: tuple[tuple[str, Phase | None, str], ...] = (
    ("CUDA graph capture", "capture", r"cuda_graph_runner\.py|cudagraph_utils|torch/cuda/graphs\.py|cuda_graph\.py"
                                      r"|graph_runner\.py"),
    ("Dynamo", "compile", r"torch/_dynamo/"),
    ("thunder", "compile", r"/thunder/"),
    ("Inductor", "compile", r"torch/_inductor/"),
    ("AOTAutograd", "compile", r"torch/_functorch/"),
    ("FX tracing", "compile", r"torch/fx/"),
    ("Triton", "compile", r"/triton/"),
    ("weight loading", "load", r"model_loader|weight_utils|safetensors/\S*:(?:load|safe_open|get_)|checkpoint\S*:load"
                               r"|transformers/modeling_utils\.py:\w*(?:load|from_pretrained)"),
    ("process group", "init", r"parallel_state\.py:\w*init|torch/distributed/rendezvous"
                              r"|torch/distributed/distributed_c10d\.py:(?:\w*init_process_group|_new_process_group_helper)"),
    ("KV cache", "kv cache", r"memory_pool\w*\.py:(?:__init__|_create_buffers)|kv_cache(?:_utils|_manager)?\.py"
                             r"|:determine_available_memory|:profile_run|:init_memory_pool|:initialize_kv_cache"),
)  # fmt: skip
_RUN_TIME = re.compile(
    r"torch/_dynamo/(?:eval_frame|external_utils)\.py|torch/_functorch/(?:aot_autograd\.py:forward|_aot_autograd/(?:runtime"
    r"_wrappers|utils)\.py)|torch/_inductor/(?:output_code|utils|runtime/(?!compile))\S*|torch/fx/(?:graph_module"
    r"|_lazy_graph_module|interpreter)\.py|/triton/runtime/(?!\S*:(?:compile|_do_compile))|:\w*replay\w*$"
)
"""Frames of these layers that every later call goes through, too: they are no sign of the phase."""
_COMPILED_LAYERS = tuple((name, phase, re.compile(pattern)) for name, phase, pattern in _LAYERS)


@lru_cache(maxsize=4096)
def place_of(file: str) -> FramePlace:
    """Whose a file is.

    >>> place_of("/home/me/pytorch/torch/fx/proxy.py")
    FramePlace(owner='library', package='torch', path='torch/fx/proxy.py', is_installed=False)
    """
    file = file.replace("\\", "/")
    site = _SITE.search(file)
    if site is not None:
        package = site["package"].removesuffix(".py")
        return FramePlace("engine" if package in _ENGINES else "library", package, site["path"], True)
    standard = _STANDARD.search(file)
    if standard is not None:
        path = standard["path"] or standard["frozen"] or standard["windows"] or f"bin/{standard['script']}"
        return FramePlace("python", "python", path, False)
    named = _by_name(file)
    if named is not None:
        return named
    if file.startswith("<"):
        return FramePlace("python", "python", file, False)
    return FramePlace("user", "", file, False)


def _by_name(file: str) -> FramePlace | None:
    """A checkout: the innermost folder that is called like a package (``sglang/python/sglang/srt``)."""
    parts = file.split("/")
    for at in range(len(parts) - 2, -1, -1):
        package = parts[at]
        if (package in _ENGINES or package in _LIBRARIES) and parts[at + 1] not in _ENVIRONMENT:
            path = "/".join(parts[at:])
            if package == "torch" and not _TORCH_PARTS.match(path):
                continue
            return FramePlace("engine" if package in _ENGINES else "library", package, path, False)
    return None


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
    where = f"{frame.file}:{frame.function}".replace("\\", "/")
    name, phase = next(
        ((name, phase) for name, phase, pattern in _COMPILED_LAYERS if pattern.search(where)), ("", None)
    )
    return name, None if _RUN_TIME.search(where) else phase
