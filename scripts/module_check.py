"""One model of other people's through ``piecegraph.compile``: calls with fresh data, compared with the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from other_models import Inputs, OtherModel, build

import piecegraph
from piecegraph.base.compare import first_difference
from piecegraph.base.structure import each_once, flatten
from piecegraph.errors import PiecegraphError

VerdictName = Literal["equal", "fell back", "refused", "wrong", "crashed", "too slow", "not built"]

BATCHES = (2, 3, 2)
"""The second is padded to 4, if that may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVerdict:
    """What came out for one model."""

    name: str
    kind: str
    verdict: VerdictName
    architecture: str = ""
    frontend: str = ""
    code: str = ""
    reason: str = ""
    seconds: float = 0.0


def check_module(name: str, kind: str, device: str, backend: str) -> ModuleVerdict:
    """Build a model and compare. Never raises."""
    about: dict[str, Any] = {"name": name, "kind": kind}
    try:
        model = build(name)
        model.module.to(device)
    except Exception as error:  # noqa: BLE001 - whatever stops it from running by itself is the verdict
        return ModuleVerdict(**about, verdict="not built", reason=_in_short(error))
    about["architecture"] = type(model.module).__name__
    try:
        with torch.no_grad():
            return ModuleVerdict(**about, **_compare(model, device, backend))
    except PiecegraphError as error:
        return ModuleVerdict(**about, verdict="refused", code=error.code, reason=_in_short(error))
    except Exception as error:  # noqa: BLE001 - nothing else may leave compile
        return ModuleVerdict(**about, verdict="crashed", reason=f"{type(error).__name__}: {_in_short(error)}")


def _compare(model: OtherModel, device: str, backend: str) -> dict[str, Any]:
    options = {"graph_device": "simulated"} if device == "cpu" else {}
    fast = piecegraph.compile(model.module, backend=backend, on_fallback="ignore", options=options)
    generator = torch.Generator().manual_seed(1)
    calls = [_on(device, model.inputs(batch, generator)) for batch in BATCHES]
    expected = [_seeded(model.module, call) for call in calls]
    found = [_seeded(fast, call) for call in calls]
    reasons = [_difference(*pair) for pair in zip(found, expected, strict=True)]
    stats = fast.stats()
    frontend = stats["plans"][0]["frontend"] if stats["plans"] else ""
    events = [event for event in stats["events"] if event not in ("PG404", "PG406", "PG510")]
    told = {"frontend": frontend, "code": ", ".join(events)}
    if any(reasons):
        if not _is_random(model, calls[0]):
            return told | {"verdict": "wrong", "reason": next(filter(None, reasons))}
        told["reason"] = "draws random numbers, and was compared by shapes"
    if stats["replayed"] == len(calls):
        return {"reason": ""} | told | {"verdict": "equal"}
    lost = [line.strip() for line in fast.explain().partition("fallbacks and other losses")[2].splitlines() if line]
    return told | {"verdict": "fell back", "reason": "; ".join(lost)[:400]}


def _on(device: str, inputs: Inputs) -> Inputs:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _seeded(function: Any, call: Inputs, seed: int = 2) -> Any:
    torch.manual_seed(seed)
    return function(**{name: tensor.clone() for name, tensor in call.items()})


def _difference(found: Any, expected: Any) -> str | None:
    leaves, _, structure = flatten(found, is_container=each_once())
    wanted, _, wanted_structure = flatten(expected, is_container=each_once())
    return first_difference(leaves, wanted) if structure == wanted_structure else "another structure"


def _is_random(model: OtherModel, call: Inputs) -> bool:
    """Whether the model itself differs with another seed."""
    return _difference(_seeded(model.module, call, 3), _seeded(model.module, call, 4)) is not None


def _in_short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
