"""The ops at which a language model is cut: attention and everything else that reads the batch or keeps state.

A traced model names each of them by its call site, a number. What stands behind the number (a cache, a module, a
kernel) is looked up in the :class:`Sites` that are current while the op runs, so that two models never share any of it,
and the same compiled pieces serve every batch. Each op writes to memory it is given, which then has a fixed address.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from piecegraph.graph.cut_rules import register_cut_op


class Sites(Protocol):
    """What the call sites of one model stand for."""

    def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
        """Run an op at a call site. Its inputs are those of the schema before ``site``."""


class _Current(threading.local):
    """Of each thread: two models may run at the same time."""

    sites: Sites | None = None


_current = _Current()


@contextlib.contextmanager
def current_sites(sites: Sites) -> Iterator[None]:
    """Ops that run inside belong to this model."""
    before, _current.sites = _current.sites, sites
    try:
        yield
    finally:
        _current.sites = before


_CACHE, _STATE = "reads the batch and the cache", "keeps a state for each sequence"

_SCHEMAS = {
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor? sinks, int site, float scale, "
    "int window, int chunk, float softcap) -> ()": _CACHE,
    "turned_attention(Tensor rows, Tensor cos, Tensor sin, Tensor? query_gain, Tensor? key_gain, float eps, "
    "Tensor(a!) out, Tensor? sinks, int site, float scale, int window, int chunk, float softcap) -> ()": _CACHE,
    "latent_attention(Tensor query, Tensor latent, Tensor rope, Tensor up_projection, Tensor(a!) out, int site, "
    "int nope_width, float scale) -> ()": _CACHE,
    "experts(Tensor hidden, Tensor expert, Tensor weight, Tensor(a!) out, int site) -> ()": "sorts tokens by expert",
    "stateful(Tensor hidden, Tensor(a!) out, int site) -> ()": _STATE,
    "causal_conv(Tensor hidden, Tensor weight, Tensor? bias, Tensor(a!) out, str activation, int site) -> ()": _STATE,
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) out, bool normalises, "
    "int site) -> ()": _STATE,
}
"""Each op, and why it is no part of a piece. What stands behind ``site`` was read when the model was traced."""

SITE_ARGS: dict[Any, int] = {}
"""Which argument of each op is its call site."""

LIBRARY = torch.library.Library("piecegraph", "FRAGMENT")


def _implementation(op: str, site: int) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        sites = _current.sites
        assert sites is not None, "an op of a language model ran outside of a forward"
        sites.run(op, arguments[site], arguments[:site])

    return run


def _no_result(*_: Any) -> None:
    """What tracing sees: the op returns nothing."""


def _define() -> None:
    for schema, reason in _SCHEMAS.items():
        name, _, arguments = schema.partition("(")
        site = arguments.partition("int site")[0].count(",")
        # The library's own calls, and not custom_op: an op on the tape is called once for each layer of each step.
        LIBRARY.define(schema)
        LIBRARY.impl(name, _implementation(name, site), "CompositeExplicitAutograd")
        torch.library.register_fake(f"piecegraph::{name}", _no_result, lib=LIBRARY)
        register_cut_op(getattr(torch.ops.piecegraph, name), reason)
        SITE_ARGS[getattr(torch.ops.piecegraph, name).default] = site


_define()

ATTENTION = torch.ops.piecegraph.attention.default
TURNED_ATTENTION = torch.ops.piecegraph.turned_attention.default
"""Attention that is given what a linear makes of tokens: see ``kernels/turned_attention.py``."""
LATENT_ATTENTION = torch.ops.piecegraph.latent_attention.default
EXPERTS = torch.ops.piecegraph.experts.default
STATEFUL = torch.ops.piecegraph.stateful.default
CAUSAL_CONV = torch.ops.piecegraph.causal_conv.default
DELTA_RULE = torch.ops.piecegraph.delta_rule.default
