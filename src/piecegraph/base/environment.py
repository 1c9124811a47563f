"""What piecegraph runs on: versions of everything that matters, read without side effects."""

from __future__ import annotations

import importlib.metadata
import platform

from piecegraph.base.version import VERSION

PACKAGES = ("torch", "triton", "transformers", "cuda-bindings", "msgspec", "click", "rich", "jinja2")


def describe_environment() -> dict[str, str]:
    """Versions of piecegraph, Python, its packages, CUDA, the driver and the GPUs. Imports torch."""
    import torch

    from piecegraph.base import torch_compat

    found = {"piecegraph": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    found |= {package: installed_version(package) or "not installed" for package in PACKAGES}
    found["torch"] = str(torch.__version__)
    found["cuda (torch build)"] = torch.version.cuda or "none"
    if not torch.cuda.is_available():
        return found | {"cuda driver": "none", "gpu": "none: compiled pieces run without graphs"}
    found["cuda driver"] = torch_compat.driver_cuda_version()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found[f"gpu {index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory}"
    return found


def installed_version(package: str) -> str | None:
    """The version of an installed package, from what pip left on disk: nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
