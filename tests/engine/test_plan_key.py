"""Keys of plans: the same in every process, another for whatever a plan depends on, and it is named."""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.base.config import make_config
from piecegraph.base.describe import Describer
from piecegraph.base.events import EventLog
from piecegraph.engine import plan_key
from piecegraph.engine.pipeline import Pipeline
from piecegraph.engine.planner import Planner, Subject
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.signature import Binder
from tests.cases.modules import MLP, Stack, attend_into


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.sizes, self.act, self.gain = {"a": (1, 2)}, torch.tanh, 0.5

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x)) * self.gain
        return x * scale


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))


def find(function: Any, *args: Any, module: nn.Module | None = None, **arguments: Any) -> str:
    """What the cache says to a call before it is traced."""
    config = make_config(backend=arguments.pop("backend", "eager"), **arguments)
    subject, events = Subject(function, "Model", module), EventLog("ignore")
    example = Planner(subject, config, events).example(Binder(function), args, {})
    rules = CutRules(config.splitting_ops)
    pipeline = Pipeline("Model", config.backend, config.passes, rules, config.options, events)
    kept = pipeline.open_kept()
    assert kept is not None
    kept.find(function, example, subject.weights())
    return str(kept.decision)


def keep(model: nn.Module) -> None:
    with torch.no_grad():
        piecegraph.compile(model, backend="eager")(torch.ones(3, 12))


def double(module: torch.fx.GraphModule) -> None:
    """A pass."""


@functools.wraps(torch.nn.functional.tanh)
def twice(x: Tensor) -> Tensor:
    """Calls itself torch's."""
    return x.tanh() * 2


def thrice(x: Tensor) -> Tensor:
    return x.tanh() * 3


def test_what_wraps_a_function_of_torchs_is_known_by_its_own_code() -> None:
    texts = {Describer().text(each) for each in (twice, functools.wraps(torch.nn.functional.tanh)(thrice))}
    assert len(texts) == 2


def set_bias(model: Model) -> None:
    model.layers[0].up.bias = None  # type: ignore[union-attr]


def tie(model: Model) -> None:
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]


def add_hook(model: Model) -> None:
    model.layers[0].register_forward_hook(lambda module, args, result: result + 1)


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "attribute": (lambda m: setattr(m, "gain", 0.25), "configuration: gain was 0.5, is 0.25"),
    "container": (lambda m: m.sizes.update(b=3), "configuration: sizes was "),
    "function": (lambda m: setattr(m, "act", torch.sin), "configuration: act was op aten::tanh, is op aten::sin"),
    "wrapped": (lambda m: setattr(m, "act", twice), "configuration: act was op aten::tanh, is function torch"),
    "class": (lambda m: setattr(m.layers, "1", nn.Identity()), "configuration: layers.1 was .*MLP, is .*Identity"),
    "mode": (lambda m: m.eval(), "configuration: training was True, is False"),
    "dtype": (lambda m: m.layers[0].half(), r"weights: layers.0.up.weight was float32\[24, 12\] cpu, is float16"),
    "missing weight": (set_bias, r"weights: layers.0.up.bias was float32\[24\] cpu, is nothing"),
    "tied weights": (tie, "layers.1.up.weight was .*, is the same as layers.0.up.weight"),
    "hook": (add_hook, "configuration: layers.0._forward_hooks was nothing, is "),
}  # fmt: skip


def test_each_part_of_a_model_is_named() -> None:
    keep(Model())
    model = Model()
    assert find(model.forward, torch.ones(5, 12), module=model).startswith("cache: warm")
    for change, named in CHANGES.values():
        model = Model()
        change(model)
        decision = find(model.forward, torch.ones(5, 12), module=model)
        assert decision.startswith("cache: cold (since ")
        assert re.search(named, decision), decision


def test_each_part_of_a_call_is_named() -> None:
    model = Model()
    keep(model)
    call = model.forward
    assert "call: x was torch.float32" in find(call, torch.ones(3, 12, dtype=torch.float64), module=model)
    assert "call: scale was 1.0, is 2.0" in find(call, torch.ones(3, 12), 2.0, module=model)
    assert "call: dims was " in find(call, torch.ones(3, 12), module=model, dynamic_dims={})
    assert "order (1, 0)" in find(call, torch.ones(12, 3).t(), module=model)


def test_each_option_is_named() -> None:
    model, x = Model(), torch.ones(3, 12)
    keep(model)
    for arguments, named in [
        ({"backend": "inductor"}, "options: backend was 'eager', is 'inductor'"),
        ({"splitting_ops": ["aten::tanh"]}, "options: splitting_ops was 'auto', is "),
        ({"passes": [double]}, "options: passes was "),
        ({"options": {"fuse_linears": True}}, "options: fuse_linears was False, is True"),
        ({"options": {"provenance": True}}, "options: provenance was False, is True"),
        ({"options": {"inductor": {"max_autotune": True}}}, "options: inductor.max_autotune was nothing, is True"),
    ]:
        assert named in find(model.forward, x, module=model, **arguments), named  # type: ignore[arg-type]


def test_versions_settings_and_the_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.ones(3, 12)
    keep(model)

    def miss() -> str:
        return find(model.forward, x, module=model)

    for target, value, named in [
        ((torch, "__version__"), "9.9", "versions: torch was "),
        ((plan_key, "_own_source"), lambda: "new", "versions: piecegraph was "),
        ((plan_key, "_installed"), lambda package: "1", "versions: triton was "),
        ((plan_key, "_processor"), lambda: "other", "device: cpu was "),
        ((torch, "get_num_threads"), lambda: 77, "device: threads was "),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(*target, value)  # type: ignore[call-overload]
            assert named in miss()
    with torch._inductor.config.patch(max_autotune=True):  # type: ignore[attr-defined]
        assert "settings: _inductor.config.max_autotune was nothing, is True" in miss()
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # it can be set when torch's own tests are about
        assert "settings: cudnn was " in miss()
    monkeypatch.setenv("TRITON_PTXAS_PATH", os.path.join(os.path.dirname(torch.__file__), "bin", "ptxas"))
    assert miss().startswith("cache: warm"), "Inductor sets it, to what comes with torch"
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert "settings: TORCHINDUCTOR_MAX_AUTOTUNE was nothing, is 1" in miss()


def test_what_has_no_key_is_not_kept_and_says_why() -> None:
    model = Model()
    model.lock = threading.Lock()
    assert (
        find(model.forward, torch.ones(3, 12), module=model) == "cache: off (there is no key: lock is a _thread.lock)"
    )
    numbers = itertools.count()
    assert "off (there is no key: numbers in " in find(lambda x: x + next(numbers), torch.ones(3))


def test_layers_that_close_over_values_are_told_apart() -> None:
    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    with torch.no_grad():
        piecegraph.compile(scaled(2.0), backend="eager")(torch.ones(3))
    assert find(scaled(2.0), torch.ones(3)).startswith("cache: warm")
    assert find(scaled(3.0), torch.ones(3)).startswith("cache: cold")
    assert find(Stack(attend_into).forward, torch.ones(3, 12)).startswith("cache: cold (nothing is kept")
