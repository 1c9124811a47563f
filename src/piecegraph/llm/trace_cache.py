"""Stands in for a model's cache while it is traced, and never again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class TraceCache:
    """No cache at all: attention sees the new keys and values only, which is what the op takes."""

    @property
    def forward_arguments(self) -> dict[str, Any]:
        """What to pass to the decoder besides tokens and positions."""
        return {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While tracing."""
        yield
