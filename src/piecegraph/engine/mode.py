"""Whether there are graphs, and in which mode: one decision, for any module and for the steps of a language model."""

from __future__ import annotations

from typing import Literal

import torch

from piecegraph.base.config import CudagraphMode, GraphDeviceName
from piecegraph.base.plan import Decision
from piecegraph.errors import ConfigError
from piecegraph.tape.device import CudaGraphs, GraphDevice
from piecegraph.tape.simulated import SimulatedGraphs


def choose_mode(
    subject: str,
    wish: CudagraphMode,
    device: torch.device,
    graph_device: GraphDeviceName,
    *,
    best: Literal["full", "piecewise"],
    reason: str,
    why_not_full: str = "",
    without: str = "",
) -> Decision:
    """``full``, ``piecewise``, or ``direct``: pieces without graphs.

    Args:
        subject: what it is decided for.
        wish: what the user asked for.
        device: where the model is.
        graph_device: the option of that name.
        best: what ``"auto"`` means.
        reason: why that is so.
        why_not_full: why it cannot be one graph; empty if it can.
        without: what is done where there are no graphs.
    """
    if wish == "none":
        return Decision(subject, "direct", "asked for")
    if device.type != "cuda" and graph_device != "simulated":
        return Decision(subject, "direct", f"{device.type} has no graphs" + (f": {without}" if without else ""))
    if wish == "full" and why_not_full:
        hint = 'use cudagraph_mode="auto"'
        raise ConfigError("PG301", f"{subject} cannot be one graph", why=why_not_full, hint=hint)
    if wish != "auto":
        return Decision(subject, wish, "asked for")
    if best == "full" and why_not_full:
        return Decision(subject, "piecewise", why_not_full)
    return Decision(subject, best, reason)


def make_graph_device(mode: str, device: torch.device) -> GraphDevice | None:
    """What captures in a mode; None where nothing is captured."""
    if mode in ("none", "direct"):
        return None
    return CudaGraphs(device) if device.type == "cuda" else SimulatedGraphs()
