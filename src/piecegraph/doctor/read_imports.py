"""Imports that may fail, each tried in a process of its own: torch, cuda-bindings, the driver's library."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from piecegraph.doctor.commands import Answer, Shell
from piecegraph.doctor.machine import Bindings, Gpu, Import, Torch

MARK_KEY = "seen by piecegraph doctor"
MARK = f'{{"{MARK_KEY}"'

IMPORT_LIMIT_S = 120.0
"""Importing torch from a cold network disk takes a minute."""


def read_torch(shell: Shell, limit_s: float = IMPORT_LIMIT_S) -> tuple[Torch, tuple[Gpu, ...]]:
    """What importing torch shows, and the GPUs it can use."""
    answer, found = _probe(shell, "torch", limit_s)
    if found is None:
        return Torch(state=_state(answer), error=_error(answer)), ()
    devices = found.pop("devices")
    gpus = tuple(Gpu(name=name, architecture=sm, memory_bytes=memory) for name, sm, memory in devices)
    found["architectures"] = tuple(found.get("architectures", ()))
    return Torch(state="ok", **found), gpus


def read_bindings(shell: Shell, limit_s: float = IMPORT_LIMIT_S) -> Bindings:
    """Whether cuda-bindings can be imported and has what is needed."""
    answer, found = _probe(shell, "bindings", limit_s)
    if found is None:
        return Bindings(state=_state(answer), error=_error(answer))
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


def _probe(shell: Shell, what: str, limit_s: float) -> tuple[Answer, dict[str, Any] | None]:
    # -P: as for an installed command, a folder called torch in the working directory is not what gets imported.
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py")), what]
    answer = shell.run(command, limit_s)
    lines = answer.out.splitlines()
    # A library may print as it is loaded, and another as the process ends.
    line = next((line for line in reversed(lines) if line.startswith(MARK)), None)
    if answer.trouble or line is None:
        return answer, None
    return answer, json.loads(line)[MARK_KEY]


def _state(answer: Answer) -> Import:
    if answer.code is None:
        return "timed out"
    if answer.code < 0:
        return "crashed"
    is_missing = any(f"No module named '{name}'" in answer.err for name in ("torch", "cuda", "cuda.bindings"))
    return "missing" if is_missing else "failed"


def _error(answer: Answer) -> str:
    if answer.code is None or answer.code < 0:
        return answer.trouble
    lines = answer.err.strip().splitlines() or ["it ended before it told anything"]
    return lines[-1].strip()[:300]
