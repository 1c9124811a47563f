"""The nouns of a machine, as read: one :class:`Machine`, of which every check is a pure function.

The one invariant: a field says what was seen, never what follows from it. What could not be read is empty or ``None``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MODELS = "Hugging Face"
"""The one folder that holds data and not compiled code: sharing it, read only, is common."""

Import = Literal["ok", "missing", "failed", "crashed", "timed out"]
"""How an import went that was tried in a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledProgram:
    """A program that is installed."""

    path: str
    version: str = ""
    """Empty where it did not tell one."""
    family: str = ""
    """``gcc`` or ``clang``, of a C compiler."""
    trouble: str = ""
    """Why it told no version: it is not there, it failed, or it did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What importing torch in another process showed."""

    state: Import
    error: str = ""
    """The last line of what a failing import printed, or the signal it died of."""
    version: str = ""
    location: str = ""
    is_checkout: bool = False
    """Imported from a source tree, not from an installed wheel."""
    cuda: str = ""
    """The CUDA version it was built for; empty for a CPU build."""
    hip: str = ""
    cxx11_abi: bool | None = None
    architectures: tuple[str, ...] = ()
    """``sm_90``, ``compute_90``: torch tells them only where it can use a GPU."""
    can_use_cuda: bool = False
    cuda_error: str = ""
    """What torch said when it was asked for its GPUs and could not use them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """What importing cuda-bindings in another process showed."""

    state: Import
    error: str = ""
    missing: tuple[str, ...] = ()
    """Functions that reading a captured graph needs and this version lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as the driver's tool tells it. Numbers are ``None`` where it does not."""

    name: str
    architecture: int | None
    """90 for sm_90."""
    memory_bytes: int | None = None
    persistence: bool | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    compute_mode: str = ""
    """``Default``, ``Exclusive_Process``, ``Prohibited``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """The CUDA compiler and what it says about itself."""

    nvcc: InstalledProgram
    architectures: tuple[int, ...] = ()
    """Those it can compile for; empty where it would not list them."""
    host_compiler: InstalledProgram | None = None
    """The compiler it calls for host code."""
    highest_gcc: int | None = None
    """From the toolkit's own header; ``None`` where that was not found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that files are kept in, or the nearest existing one above it."""

    what: str
    """``Inductor cache``."""
    path: str
    variable: str
    """The environment variable that moves it."""
    exists: bool = True
    is_writable: bool = True
    is_mine: bool = True
    """Owned by this user or by root."""
    others_may_write: bool = False
    """Everybody may put files in it (the sticky bit of ``/tmp`` does not help inside a folder below)."""
    may_execute: bool = True
    """False on a file system mounted ``noexec``."""
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything the checks look at."""

    system: str = "Linux"
    python: str
    has_python_headers: bool = True
    is_free_threaded: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed versions by distribution name, of the packages that matter here."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Exact versions that installed packages ask for: ``{"torch>triton": "3.6.0", "torchvision>torch": "2.11.0"}``."""
    torch: Torch
    cuda_bindings: Bindings
    driver: str = ""
    driver_cuda: str = ""
    """The newest CUDA version the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    gpu_trouble: str = ""
    """Why no GPU could be listed."""
    toolkit: Toolkit | None = None
    c_compiler: InstalledProgram | None = None
    """What Triton calls: ``CC``, or gcc, or clang. ``None`` where there is none."""
    cxx_compiler: InstalledProgram | None = None
    """What Inductor calls: ``CXX``, or g++."""
    older_gccs: Mapping[str, str] = field(default_factory=dict)
    """Other gcc versions that are installed: major version to path."""
    triton_ptxas: InstalledProgram | None = None
    """The assembler that Triton uses: ``TRITON_PTXAS_PATH``, or the one in its package."""
    ptxas: InstalledProgram | None = None
    """The one on ``PATH``."""
    rustc: InstalledProgram | None = None
    shm_bytes: int | None = None
    memory_bytes: int | None = None
    """Of the machine, or of the container where that is less."""
    open_files: int | None = None
    folders: tuple[Folder, ...] = ()
    refused_preloads: tuple[str, ...] = ()
    """Libraries that LD_PRELOAD names and the loader refuses, with the reason."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set and matter here."""
    scripts_folder: str = ""
    """Where this Python's own programs are: first on ``PATH`` in an active environment."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing.

    >>> numbers("2.13.0+cu130"), numbers("580.95.05"), numbers("unknown")
    ((2, 13, 0), (580, 95, 5), ())
    """
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def minor(version: str) -> str:
    """The first two numbers of a version: ``2.13``; empty if there are none."""
    return ".".join(map(str, numbers(version)[:2]))
