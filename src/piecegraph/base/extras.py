"""Parts of piecegraph that need packages of an extra, which may be missing or too old."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence

from piecegraph.base.environment import installed_version
from piecegraph.errors import MissingPackageError

OLDEST = {"transformers": "5.17"}
"""Versions below which an import ends somewhere inside; as in pyproject.toml."""


def require_extra(extra: str, packages: Sequence[str], why: str) -> None:
    """Raise PG615 unless all of these packages of an extra are there. None of them is imported."""
    for package in packages:
        oldest = OLDEST.get(package, "0")
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            what = f"{package} is not installed"
        elif (found := installed_version(package)) is not None and _parts(found) < _parts(oldest):
            what = f"{package} {found} is installed, which is older than {oldest}"
        else:
            continue
        raise MissingPackageError("PG615", what, why=why, hint=f'pip install "piecegraph[{extra}]"')


def _parts(version: str) -> list[int]:
    """
    >>> _parts("5.17.0.dev0") > _parts("5.9")
    True
    """
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
