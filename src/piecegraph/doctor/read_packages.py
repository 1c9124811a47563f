"""Packages: the versions that are installed, and imports that may fail, each tried in a process of its own.

Nothing is imported here: versions are read from what pip left on disk.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from piecegraph.base.environment import PACKAGES, installed_version
from piecegraph.doctor import facts
from piecegraph.doctor.commands import CommandResult, Shell
from piecegraph.doctor.machine import Bindings, Gpu, Import, Torch

MORE_PACKAGES = (
    "torchvision",
    "torchaudio",
    "pytorch-triton",
    "flashinfer-python",
    "flashinfer-jit-cache",
    *facts.NVSHMEM.values(),
)

MARK_KEY = "seen by piecegraph doctor"
MARK = f'{{"{MARK_KEY}"'

IMPORT_LIMIT_S = 120.0
"""Importing torch from a cold network disk takes a minute."""


def read_packages() -> dict[str, str]:
    """The installed versions, from what pip left on disk: nothing is imported."""
    found = {name: installed_version(name) for name in (*PACKAGES, *MORE_PACKAGES)}
    return {name: version for name, version in found.items() if version}


def read_pins() -> dict[str, str]:
    """The exact versions that torch, torchvision and torchaudio ask for."""
    asked = {"torch": "triton", "torchvision": "torch", "torchaudio": "torch"}
    found = {}
    for package, needed in asked.items():
        try:
            requirements = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        pin = parse_pin(requirements, needed)
        if pin:
            found[f"{package}>{needed}"] = pin
    return found


def parse_pin(requirements: Iterable[str], needed: str) -> str:
    """The exact version asked for, or an empty string.

    >>> parse_pin(["sympy>=1.13.3", "triton==3.6.0; platform_system == 'Linux'"], "triton")
    '3.6.0'
    """
    for requirement in requirements:
        exact = re.match(rf"(?:pytorch-)?{needed}\s*\(?\s*==\s*([\w.+]+)", requirement)
        if exact:
            return exact[1]
    return ""


def read_torch(shell: Shell, limit_s: float = IMPORT_LIMIT_S) -> tuple[Torch, tuple[Gpu, ...]]:
    """What importing torch shows, and the GPUs it can use."""
    result, found = _probe(shell, "torch", limit_s)
    if found is None:
        return Torch(state=_state(result), error=_error(result)), ()
    devices = found.pop("devices")
    gpus = tuple(Gpu(name=name, architecture=sm, memory_bytes=memory) for name, sm, memory in devices)
    found["architectures"] = tuple(found.get("architectures", ()))
    return Torch(state="ok", **found), gpus


def read_bindings(shell: Shell, limit_s: float = IMPORT_LIMIT_S) -> Bindings:
    """Whether cuda-bindings can be imported and has what is needed."""
    result, found = _probe(shell, "bindings", limit_s)
    if found is None:
        return Bindings(state=_state(result), error=_error(result))
    return Bindings(state="ok", missing=tuple(found["missing"]))


def read_driver_cuda(shell: Shell) -> str:
    """The newest CUDA version the driver supports, empty without a driver."""
    _, found = _probe(shell, "driver", shell.limit_s)
    return str(found["cuda"]) if found else ""


def package_folder(name: str) -> Path | None:
    """Where an installed package is, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _probe(shell: Shell, what: str, limit_s: float) -> tuple[CommandResult, dict[str, Any] | None]:
    # -P: as for an installed command, a folder called torch in the working directory is not what gets imported.
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py")), what]
    result = shell.run(command, limit_s)
    lines = result.out.splitlines()
    # A library may print as it is loaded, and another as the process ends.
    line = next((line for line in reversed(lines) if line.startswith(MARK)), None)
    if result.trouble or line is None:
        return result, None
    return result, json.loads(line)[MARK_KEY]


def _state(result: CommandResult) -> Import:
    if result.code is None:
        return "timed out"
    if result.code < 0:
        return "crashed"
    is_missing = any(f"No module named '{name}'" in result.err for name in ("torch", "cuda", "cuda.bindings"))
    return "missing" if is_missing else "failed"


def _error(result: CommandResult) -> str:
    if result.code is None or result.code < 0:
        return result.trouble
    lines = result.err.strip().splitlines() or ["it ended before it told anything"]
    return lines[-1].strip()[:300]
