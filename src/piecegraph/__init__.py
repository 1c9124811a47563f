"""Piecewise CUDA graphs for any PyTorch model.

``import piecegraph`` is cheap: torch is imported when the first name is used, so the command line can print its help
at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piecegraph.base.version import VERSION

__version__ = VERSION

_HOMES = {
    "AsyncLLM": "piecegraph.llm.async_llm",
    "LLM": "piecegraph.llm.llm",
    "compile": "piecegraph.api",
    "install": "piecegraph.api",
    "eager": "piecegraph.api",
    "dump": "piecegraph.dumps.target",
    "eager_op": "piecegraph.engine.breaker",
    "intercept": "piecegraph.engine.intercepting",
    "register_cut_op": "piecegraph.graph.cut_rules",
    "errors": "piecegraph.errors",
    "trace": "piecegraph.provenance.trace",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "__version__",
    "compile",
    "dump",
    "eager",
    "eager_op",
    "errors",
    "install",
    "intercept",
    "register_cut_op",
    "trace",
]

if TYPE_CHECKING:
    from piecegraph import errors
    from piecegraph.api import compile, eager, install
    from piecegraph.dumps.target import dump
    from piecegraph.engine.breaker import eager_op
    from piecegraph.engine.intercepting import intercept
    from piecegraph.graph.cut_rules import register_cut_op
    from piecegraph.llm.async_llm import AsyncLLM
    from piecegraph.llm.llm import LLM
    from piecegraph.provenance.trace import trace


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'piecegraph' has no attribute {name!r}")
    from piecegraph.base.progress import timed_import

    home = timed_import(_HOMES[name], of=_HOMES[name])
    return home if name == "errors" else getattr(home, name)


def __dir__() -> list[str]:
    return __all__
