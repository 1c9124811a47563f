"""Run as a program of its own, so that an import that crashes or hangs is a finding. Prints one line of JSON.

Imports nothing of piecegraph: what it looks at may be what breaks piecegraph.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def look_at_torch() -> dict[str, Any]:
    """What torch says of itself and of the GPUs it can use."""
    from pathlib import Path

    import torch

    folder = Path(torch.__file__).parent
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "location": str(folder),
        "is_checkout": (folder.parent / "setup.py").exists() and (folder.parent / "CMakeLists.txt").exists(),
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "can_use_cuda": torch.cuda.is_available(),
        "devices": [],
    }
    if found["can_use_cuda"]:
        found["architectures"] = torch.cuda.get_arch_list()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            architecture = 10 * properties.major + properties.minor
            found["devices"].append([properties.name, architecture, properties.total_memory])
    elif torch.version.cuda:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            found["cuda_error"] = str(error).strip().splitlines()[0]
    return found


def look_at_bindings() -> dict[str, Any]:
    """Which functions cuda-bindings lacks of those that reading a graph during its capture needs."""
    from cuda.bindings import runtime

    needed = ("cudaStreamGetCaptureInfo", "cudaGraphGetNodes", "cudaGraphNodeGetType", "cudaDriverGetVersion")
    return {"missing": [name for name in needed if not hasattr(runtime, name)]}


def look_at_driver() -> dict[str, Any]:
    """The newest CUDA version the driver supports. Asks the driver itself, which needs neither torch nor a tool."""
    import ctypes

    version = ctypes.c_int(0)
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
        return {"cuda": ""}
    return {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}


if __name__ == "__main__":
    look = {"torch": look_at_torch, "bindings": look_at_bindings, "driver": look_at_driver}[sys.argv[1]]
    sys.stdout.write("\n" + json.dumps({"seen by piecegraph doctor": look()}) + "\n")
