"""What several workers of pytest need and one of them makes: a job that takes a minute runs once for all its tests."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once_for_all_workers(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What was made, as JSON gives it back. Who comes second waits; who comes after one that failed tries again."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has its own below
    made = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(json.dumps(make()))
        return json.loads(made.read_text())
