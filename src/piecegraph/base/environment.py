"""What piecegraph runs on: versions of everything that matters, read without side effects."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform

from piecegraph.base.version import VERSION

PACKAGES = ("torch", "triton", "transformers", "cuda-bindings", "msgspec", "click", "rich", "jinja2")


def describe_environment() -> dict[str, str]:
    """Versions of piecegraph, Python, its packages, CUDA, the driver and the GPUs. Imports torch."""
    import torch

    found = {"piecegraph": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    found |= {package: installed_version(package) or "not installed" for package in PACKAGES}
    found["torch"] = str(torch.__version__)
    found["cuda (torch build)"] = torch.version.cuda or "none"
    if not torch.cuda.is_available():
        return found | {"cuda driver": "none", "gpu": "none: compiled pieces run without graphs"}
    found["cuda driver"] = driver_version()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found[f"gpu {index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory}"
    return found


def driver_version(library: str = "libcuda.so.1") -> str:
    """The newest CUDA version that the installed driver supports. Torch knows it, too, under names that come and go."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "unknown"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def installed_version(package: str) -> str | None:
    """The version of an installed package, from what pip left on disk: nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
