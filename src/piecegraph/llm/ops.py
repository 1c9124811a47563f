"""The ops at which a language model is cut: attention and everything else that reads the batch or keeps state.

A traced model names each of them by its call site, a number. What stands behind the number (a cache, a module, a
kernel) is looked up in the :class:`Sites` that are current while the op runs, so that two models never share any of it,
and the same compiled pieces serve every batch. Each op writes to memory it is given, which then has a fixed address.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from piecegraph.graph.cut_rules import register_cut_op


class StateSites(Protocol):
    """What the call sites of layers that keep a state stand for."""

    def mix_state(self, site: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Run a layer that keeps a state for each sequence."""

    def convolve(
        self,
        site: int,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: str,
    ) -> None:
        """A causal convolution over each sequence that remembers its last inputs."""

    def delta_rule(
        self,
        site: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        normalises: bool,
    ) -> None:
        """The gated delta rule over each sequence, from its remembered state."""


class Sites(Protocol):
    """What the call sites of one model stand for."""

    def attend(
        self,
        site: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write the new keys and values to the cache and attend."""

    def attend_latent(
        self,
        site: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        up_projection: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The same on a compressed cache."""

    def mix_experts(
        self, site: int, hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Send every token through the experts chosen for it."""

    @property
    def states(self) -> StateSites:
        """Of the layers that keep a state for each sequence."""


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


def _sites() -> Sites:
    assert _current.sites is not None, "an op of a language model ran outside of a forward"
    return _current.sites


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    site: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> None:
    _sites().attend(site, query, key, value, out, sinks)


def _latent_attention(
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    up_projection: torch.Tensor,
    out: torch.Tensor,
    site: int,
    nope_width: int,
    scale: float,
) -> None:
    _sites().attend_latent(site, query, latent, rope, up_projection, out)


def _experts(hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, site: int) -> None:
    _sites().mix_experts(site, hidden, expert, weight, out)


def _stateful(hidden: torch.Tensor, out: torch.Tensor, site: int) -> None:
    _sites().states.mix_state(site, hidden, out)


def _causal_conv(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    site: int,
) -> None:
    _sites().states.convolve(site, hidden, weight, bias, out, activation)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    normalises: bool,
    site: int,
) -> None:
    _sites().states.delta_rule(site, query, key, value, decay, beta, out, normalises)


_SCHEMAS = {
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor? sinks, int site, float scale, "
    "int window, int chunk, float softcap) -> ()": (_attention, "reads the batch and the cache"),
    "latent_attention(Tensor query, Tensor latent, Tensor rope, Tensor up_projection, Tensor(a!) out, int site, "
    "int nope_width, float scale) -> ()": (_latent_attention, "reads the batch and the cache"),
    "experts(Tensor hidden, Tensor expert, Tensor weight, Tensor(a!) out, int site) -> ()": (
        _experts,
        "sorts tokens by expert",
    ),
    "stateful(Tensor hidden, Tensor(a!) out, int site) -> ()": (_stateful, "keeps a state for each sequence"),
    "causal_conv(Tensor hidden, Tensor weight, Tensor? bias, Tensor(a!) out, str activation, int site) -> ()": (
        _causal_conv,
        "keeps a state for each sequence",
    ),
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) out, bool normalises, "
    "int site) -> ()": (_delta_rule, "keeps a state for each sequence"),
}

LIBRARY = torch.library.Library("piecegraph", "FRAGMENT")


def _no_result(*_: Any) -> None:
    """What tracing sees: the op returns nothing."""


def _define() -> None:
    for schema, (function, reason) in _SCHEMAS.items():
        name = schema.partition("(")[0]
        # The library's own calls, and not custom_op: an op on the tape is called once for each layer of each step.
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"piecegraph::{name}", _no_result, lib=LIBRARY)
        register_cut_op(getattr(torch.ops.piecegraph, name), reason)


_define()

ATTENTION = torch.ops.piecegraph.attention.default
LATENT_ATTENTION = torch.ops.piecegraph.latent_attention.default
EXPERTS = torch.ops.piecegraph.experts.default
STATEFUL = torch.ops.piecegraph.stateful.default
CAUSAL_CONV = torch.ops.piecegraph.causal_conv.default
DELTA_RULE = torch.ops.piecegraph.delta_rule.default
