"""Draws random programs.

A program is lines of Python: the body of a ``forward``, and a schedule of calls with what happens between them. What is
run is the text itself (:attr:`Program.source`). A line is drawn from a list of patterns, filled with names at hand, and
run at once on the first call's arguments: one that raises is left out, so nothing here knows the rules of shapes.
"""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzzing import judge

Draw = Callable[[st.SearchStrategy[Any]], Any]

_MODULE = "fuzzed_program"

EXPRESSIONS: Mapping[str, Sequence[str]] = {
    "pointwise": (
        "{a} + 1", "{a}.tanh()", "{a}.relu()", "-{a}", "{a} * 2", "{a}.abs()", "{a} + {b}", "{a} * {b}", "{a} - {b}",
        "torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b})", "{a} > 0", "{a}.clone()", "{a}.sin()",
        "torch.zeros_like({a})", "{a}.to({dtype})", "{a}.logical_not()", "{a} / 2",
    ),
    "views": (
        "{a}[1:]", "{a}.t()", "{a}[0]", "{a}[::2]", "{a}[:, :2]", "{a}[..., -1]", "{a}.view(-1)", "{a}.reshape(-1)",
        "{a}.unsqueeze(0)", "{a}.detach()", "{a}.contiguous()", "{a}.expand(2, *{a}.shape)", "{a}.transpose(0, -1)",
        "{a}.split(2, -1)[1]", "{a}.unbind(-1)[0]", "{a}.diagonal()", "{a}.view_as({b})", "{a}.squeeze()",
        "{a}.view(torch.int32)", "{a}.chunk(2)[0]", "{a}.narrow(0, 0, 1)", "{a}.movedim(0, -1)", "{a}.unfold(0, 2, 1)",
        "{a}.as_strided((2, 2), (1, 2))", "{a}[None]", "{a}.flatten(0, 1)", "{a}.to({a}.dtype)",
    ),
    "complex": (
        "{a}.real", "{a}.conj()", "{a}.imag", "torch.complex({a}, {a})", "torch.view_as_real({a})",
        "{a}.to(torch.complex64)",
        "{a}.abs()", "{a}.conj() * 2", "torch.fft.ifft({a})", "torch.fft.fft({a}).real",
    ),
    "rows": (
        "{a}.sum(0)", "{a}.sum(-1)", "{a}.mean(0)", "{a}.sum()", "{a}.softmax(-1)", "{a}.softmax(0)", "{a}.cumsum(0)",
        "{a}.flip(0)", "{a}.roll(1, 0)", "{a}.sort(0).values", "{a}.argmax(-1)", "{a}.max(-1)", "{a}.amax(0)",
        "torch.cat([{a}, {b}])", "torch.stack([{a}, {b}])", "torch.cat([{a}, {b}], -1)", "{a}.repeat(2, 1)",
        "{a}.index_select(0, {i})", "{a}[{i}]", "F.pad({a}, (1, 0))", "{a}.any()", "{a}.topk(1, 0)",
    ),
    "weights": (
        "{a} @ self.w", "{a} + self.b", "self.lin({a})", "self.lin({a}).relu()", "{a} * self.mean",
        "self.cache[: {a}.shape[0]]",
        "F.linear({a}, self.w, self.b)", "self.w.t()", "self.count + 1", "F.layer_norm({a}, (4,), self.b)",
        "self.norm({a})",
        "self.w", "self.mean", "self.cache.view(-1, 2)", "F.embedding({i}, self.cache)",
    ),
    "sizes": (
        "{a} * {a}.shape[0]", "torch.arange({a}.shape[0], device={a}.device)", "{a}.new_ones({a}.shape[0])",
        "{a}.shape[0]",
        "{a}.reshape({a}.shape[0], -1)", "{a} + 1 if {a}.shape[0] > 4 else {a} - 1", "{a}.numel() * 2", "{a}.shape",
        "torch.ones({a}.shape[-1], {a}.shape[0], device={a}.device)", "{a} / {a}.shape[0]", "{a}[: {a}.shape[0] // 2]",
        "{a}[{a}.shape[0] - 1]", "{a}.size(0) == 4", "{a}.stride()", "{a}.is_contiguous()", "{a}.storage_offset()",
        "torch.arange(6, device={a}.device)", "torch.eye(4, device={a}.device)",
        "torch.tensor([1.0, 2.0], device={a}.device)",
    ),
    "python": (
        "{a} * {k}", "{a} + 1 if {k} else {a}", "{a}[: int({k})]", "{a}.to({a}.dtype) if {k} else -{a}", "{k}", "None",
    ),
    "cuts": (
        "torch.ops.pgfuzz.cut({a})", "torch.ops.pgfuzz.cut_two({a})[0]", "torch.ops.pgfuzz.cut_two({a})[1]",
        "torch.ops.pgfuzz.cut({a}).t()", "torch.ops.pgfuzz.cut({a}[0])",
    ),
    "eager": ('eager_pair({a})["double"]', 'eager_pair({a})["rows"]', "eager_into({a}, {b})"),
    "random": (
        "torch.rand_like({a})", "torch.randn({a}.shape[0], 4, device={a}.device)", "F.dropout({a}, 0.5, self.training)",
        "F.dropout({a}, 0.5, True)", "{a}.bernoulli(0.5)", "torch.randperm({a}.shape[0], device={a}.device)",
    ),
    "data": ("{a}[{a} > 0].sum()", "({a} > 0).nonzero()", "{a}.sum().item()", "{a} * ({a} > 0).sum().item()"),
}  # fmt: skip
"""Right-hand sides. ``{a}`` is any tensor, ``{b}`` one of the same shape, ``{i}`` indices, ``{k}`` no tensor."""

STATEMENTS: Mapping[str, Sequence[str]] = {
    "writes": (
        "{a}.add_(1)", "{a}.mul_({b})", "{a}.copy_({b})", "{a}[0] = 0", "{a} += {b}", "{a}[1:] = {b}[1:]",
        "{a}.zero_()",
        "{a}[:, 0] += 1", "{a}[{a} > 0] = 0", "torch.add({a}, {b}, out={b})", "{a}.relu_()", "{a}[::2].mul_(2)",
        "{a}.t_()",
        "{a}.index_fill_(0, {i}, 2)", "{a}.fill_(3)", "{a}.unsqueeze_(0)", "{a}.t().add_(1)", "{a}[0].copy_({b}[-1])",
    ),
    "state": (
        "self.count += 1", "self.count.add_({a}.shape[0])", "self.mean.copy_({a}.mean(0))", "self.mean.mul_(0.5)",
        "self.cache[: {a}.shape[0]] = {a}", "self.cache[0].add_({a}[0])", "self.mean.add_({a}.sum(0))",
        "self.cache.index_copy_(0, {i}[:1], {a}[:1])",
    ),
    "layers": (
        "for layer in self.layers: {a} = layer({a})", "for layer in self.layers: {a} = layer({a})",
        "for layer in self.layers: {a} = layer({b}) + {a}", "for layer in self.layers: {a}.copy_(layer({a}))",
        "for n, layer in enumerate(self.layers): {a} = layer({a}) if n != 3 else {a}",
        "for n, layer in enumerate(self.layers): {a} = layer({a}) * (2 if n == 4 else 1)",
        "for n, layer in enumerate(self.layers): {a} = layer({a} if n < 3 else {b})",
        "for n, layer in enumerate(self.layers): {a} = layer({a}) + self.cache[n]",
        "for n, layer in enumerate(self.layers): {a} = layer({a}) / (n + 1)",
        "for layer in self.layers: {a} = layer({a}); layer.seen.add_(1)",
        "for layer in self.layers: {a} = layer({a}) * layer.seen",
        "for layer in self.layers: {a}, {b} = layer({b}), {a}",
        "for layer in self.layers: {a} = layer(layer({a}))",
        "for layer in self.layers: {a} = F.linear({a}, layer.lin.weight)",
        "for layer in reversed(self.layers): {a} = layer({a})", "for layer in self.layers[1:]: {a} = layer({a})",
        "for layer in self.layers: {a} = layer({a}) if layer.number != 2 else -layer({a})",
        "for layer in self.layers: self.mean.add_(layer({a}).sum(0)); {a} = layer({a})",
        "{a} = {a} * self.layers[-1].seen", "{a} = {a} + len(self.layers)",
    ),
    "cuts": ("torch.ops.pgfuzz.cut_into({a}, {b})", "torch.ops.pgfuzz.cut_into({a}[0], self.mean)"),
    "eager": ("eager_into({a}, {b})",),
    "random": ("{a}.uniform_()",),
}  # fmt: skip

EVENTS: Mapping[str, Sequence[str]] = {
    "weights": ("model.w.data.mul_(2)", "model.mean.zero_()", "model.lin.bias.data.add_(1)", "model.cache.add_(1)"),
    "replaced": (
        "model.w = nn.Parameter(values({seed}, 4, 4))", "model.w.data = values({seed}, 4, 4)",
        "model.mean = values({seed}, 4)",
        "model.load_state_dict({{'w': values({seed}, 4, 4)}}, strict=False, assign=True)",
        "model.double().float()", "model.lin = nn.Linear(4, 4, device=DEVICE); model.lin.bias.data.zero_()",
    ),
    "layers": (
        "model.layers[3].lin.weight.data.mul_(2)", "model.layers[4].seen.zero_()",
        "model.layers[2].lin.bias = nn.Parameter(values({seed}, 4))", "model.layers[1].gain = 1.5",
        "model.layers[3].gain = 0.25", "model.layers = model.layers[:4]",
        "model.layers.insert(0, model.layers[3])", "model.layers.pop(1)", "model.layers[0].lin.bias = None",
        "model.layers[2].forward = lambda x: x * 2",
        "model.layers[4].register_forward_hook(lambda layer, args, out: out * 2)",
    ),
    "mode": ("model.train()", "model.eval()"),
    "results": ("run.poke(r{last})",),
    "arguments": ("{x}.mul_(2)",),
}  # fmt: skip
"""What happens between calls."""

LAYOUTS = (
    "values({seed}, {n}, 4)",
    "values({seed}, 4, {n}).t()",
    "values({seed}, {n} * 2, 4)[::2]",
    "values({seed}, {n}, 8)[:, ::2]",
    "values({seed}, {n} + 1, 4)[1:]",
    "values({seed}, 1, 4).expand({n}, 4)",
    "values({seed}, {n} * 4).view({n}, 4)",
)
"""Tensors of {n} rows and four columns."""

GROUPS = tuple(dict.fromkeys((*EXPRESSIONS, *STATEMENTS, *EVENTS, "alias", "layouts", "dtypes")))
DTYPES = ("torch.float32", "torch.float64", "torch.int64", "torch.float16", "torch.bool", "torch.complex64")
SIZES = (5, 3, 8, 4, 2, 1, 7, 9, 0)
_MAX_NUMEL = 4096
_RARE = ("eager", "data", "dtypes", "random", "replaced")
"""Groups that few programs have: what is refused, or not the plan's to serve, hides everything behind it."""


@dataclass(frozen=True)
class Program:
    """A function and its calls, as text."""

    parameters: tuple[str, ...]
    """Of the function: ``x: Tensor``, ``k=2``."""
    body: tuple[str, ...]
    results: tuple[str, ...]
    shape: str
    """How results are returned: ``({0}, {1})``."""
    schedule: tuple[str, ...]
    arguments: tuple[tuple[str, str], ...]
    """Of ``compile``, each as text."""
    mode: str
    door: str
    is_function: bool

    @property
    def source(self) -> str:
        """The program as it is run, and as it is written down. It takes its names from ``judge.py``."""
        head = [] if self.is_function else ["class Model(Skeleton):"]
        indent = "" if self.is_function else "    "
        names = self.parameters if self.is_function else ("self", *self.parameters)
        body = [*self.body, f"return {self.shape.format(*self.results)}"]
        return "\n".join(
            (
                *head,
                f"{indent}def forward({', '.join(names)}):",
                *(f"{indent}    {line}" for line in body),
                "\n",
                "def schedule(model, run):",
                *(f"    {line}" for line in self.schedule),
                "\n",
                "CASE = Case(",
                f"    make={'lambda: forward' if self.is_function else 'Model'},",
                "    schedule=schedule,",
                f"    arguments=dict({', '.join(f'{name}={text}' for name, text in self.arguments)}),",
                f"    mode={self.mode!r},",
                f"    door={self.door!r},",
                ")",
                "",
            )
        )

    def case(self) -> judge.Case:
        """The program, ready to run: in a module, so that its plans can be kept."""
        file = f"{_MODULE}.py"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        module = types.ModuleType(_MODULE)
        vars(module).update({name: value for name, value in vars(judge).items() if not name.startswith("__")})
        sys.modules[_MODULE] = module
        module.__file__ = file
        exec(compile(self.source, file, "exec"), vars(module))
        made: judge.Case = module.CASE
        return made

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less."""
        for field in ("schedule", "body", "results", "arguments", "parameters"):
            parts = getattr(self, field)
            for i in reversed(range(len(parts))):
                changed = replace(self, **{field: (*parts[:i], *parts[i + 1 :])})
                if field == "results":
                    changed = replace(changed, shape=_tuple(len(changed.results)))
                if changed.schedule and changed.results:
                    yield changed
        if self.mode != "no_grad" or self.door != "original":
            yield replace(self, mode="no_grad", door="original")
        if len(self.results) == 1 and self.shape != "{0}":
            yield replace(self, shape="{0}")
        if not self.is_function and not any(
            "self" in line or "model" in line for line in (*self.body, *self.results, *self.schedule[1:])
        ):
            yield replace(self, is_function=True)


def _tuple(length: int) -> str:
    return f"({', '.join(f'{{{i}}}' for i in range(length))},)"


class _Writer:
    """Writes a program line by line."""

    def __init__(self, draw: Draw, without: Collection[str]) -> None:
        self._draw = draw
        self._without = without
        self.scope: dict[str, Any] = {}
        """What each name is in the first call."""
        self.body: list[str] = []
        self._globals = dict(vars(judge))
        self._globals["self"] = judge.Skeleton()

    def pick(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(options))

    def group(self, groups: Mapping[str, Sequence[str]]) -> str:
        """A pattern of one group; empty if all groups are left out."""
        allowed = [name for name in groups if name not in self._without]
        return str(self.pick(groups[self.pick(allowed)])) if allowed else ""

    def runs(self, line: str) -> bool:
        """Run a line on the first call's values, and say whether it works."""
        try:
            with torch.no_grad(), judge.warnings.catch_warnings():
                judge.warnings.simplefilter("ignore")
                exec(line, self._globals, self.scope)
        except Exception:
            return False
        return True

    def enter(self, parameters: Sequence[str], schedule: Sequence[str]) -> None:
        """Begin with the arguments of the first call, and take them apart."""
        names = [parameter.partition(":")[0].partition("=")[0] for parameter in parameters]
        scope = {**self._globals, "model": self._globals["self"]}
        exec(f"def run({', '.join(parameters)}):\n    return dict({', '.join(f'{n}={n}' for n in names)})", scope)
        exec("\n".join(schedule), scope)
        self.scope |= scope["r0"]
        for parameter in parameters:
            for line in PARAMETERS[parameter]:
                assert self.runs(line), line
                self.body.append(line)

    def names(self, fits: Callable[[Any], bool]) -> list[str]:
        return [name for name, value in self.scope.items() if fits(value)]

    def fill(self, pattern: str) -> str | None:
        """The pattern with names at hand, or None if there are none that fit."""
        tensors = self.names(lambda v: isinstance(v, torch.Tensor))
        names: dict[str, str] = {"dtype": self.pick(DTYPES) if "{dtype}" in pattern else ""}
        if "{a}" in pattern:
            if not tensors:
                return None
            names["a"] = self.pick(tensors[::-1])
        if "{b}" in pattern:
            shape = self.scope[names["a"]].shape
            names["b"] = self.pick(self.names(lambda v: isinstance(v, torch.Tensor) and v.shape == shape))
        if "{i}" in pattern:
            indices = self.names(lambda v: isinstance(v, torch.Tensor) and v.dtype is torch.int64 and v.dim() == 1)
            names["i"] = self.pick(indices) if indices else "torch.zeros(1, dtype=torch.int64, device=DEVICE)"
        if "{k}" in pattern:
            numbers = self.names(lambda v: isinstance(v, (int, float)))
            names["k"] = self.pick([*numbers, "2"])
        return pattern.format(**names)

    def write_line(self) -> None:
        """Add one line that works, if the one drawn does."""
        if self.pick((True, True, True, False)):
            expression = self.fill(self.group(EXPRESSIONS))
            name = f"v{len(self.body)}"
            line = expression and f"{name} = {expression}"
        else:
            line = self.fill(self.group(STATEMENTS))
        if line and self.runs(line):
            self.body.append(line)
            self.scope.pop("layer", None)  # the model's own: the compiled one returns another
            for name, value in list(self.scope.items()):
                if isinstance(value, torch.Tensor) and value.numel() > _MAX_NUMEL:
                    del self.scope[name]


PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "x: Tensor": (),
    "y: Tensor": (),
    "z": (),
    "index: Tensor": (),
    "pair": ("p, q = pair",),
    "batch": ('u = batch["u"]', 'm = batch["m"]'),
    "k=2": (),
    "flag=True": (),
}
"""The parameters a function may have, and the lines that take them apart."""


CONSTANTS: Mapping[str, Sequence[str | None]] = {
    "k": (None, "3", "2", "0.5", "True", "0"),
    "flag": (None, "False", "True", "1"),
}
"""What is passed where no tensor is; None leaves the argument out."""


class _Calls:
    """Writes the schedule."""

    def __init__(self, writer: _Writer, parameters: Sequence[str], without: Collection[str]) -> None:
        self._writer = writer
        self._parameters = parameters
        self._without = without
        self._varies = not {"z", "pair", "batch"} & set(parameters)
        """Whether every tensor may have other rows from call to call: where some may not, such calls are eager."""
        self._rows = 0
        self._constants: dict[str, str | None] = {}
        self._seed = 100
        self._made: dict[str, tuple[int, str]] = {}
        """The rows and the dtype of every tensor of the schedule."""
        self.lines: list[str] = []
        self.num_calls = 0

    def write_call(self) -> None:
        """Make arguments and call."""
        pick, number = self._writer.pick, self.num_calls
        if number == 0 or pick((True, False) if self._varies else (False,) * 4 + (True,)):
            self._rows = pick(SIZES)
        rows = self._rows
        dtype = pick(("torch.float32",) * 3 + DTYPES[1:]) if "dtypes" not in self._without else "torch.float32"
        passed = []
        for parameter in self._parameters:
            name = parameter.partition(":")[0].partition("=")[0]
            text = self._argument(name, number, rows, dtype)
            if text is not None:
                passed.append(
                    f"{name}={text}"
                    if "=" in parameter or pick((False, True)) or any("=" in p for p in passed)
                    else text
                )
        if number > 0 and pick((False,) * 7 + (True,)):
            self.lines.append(f"run.capture({', '.join(passed)})")
        self.lines.append(f"r{number} = run({', '.join(passed)})")
        self.num_calls += 1

    def write_event(self) -> None:
        """Something happens between two calls."""
        pattern = self._writer.group(EVENTS)
        tensors = [name for name, (_, dtype) in self._made.items() if dtype in DTYPES[:2]]
        if pattern and ("{x}" not in pattern or tensors):
            x = self._writer.pick(tensors) if tensors else ""
            self.lines.append(pattern.format(seed=self._next_seed(), last=self.num_calls - 1, x=x))

    def _argument(self, name: str, number: int, rows: int, dtype: str) -> str | None:
        pick = self._writer.pick
        if name in CONSTANTS:
            if number == 0 or pick((False,) * 5 + (True,)):
                self._constants[name] = pick(CONSTANTS[name])
            return self._constants[name]
        if name == "pair":
            return f"({self._tensor('p', number, rows, dtype)}, {self._tensor('q', number, rows, dtype)})"
        if name == "batch":
            u = self._tensor("u", number, rows, dtype)
            return f"{{'u': {u}, 'm': {pick(('None', '1.5', '2'))}}}"
        if name == "index":
            self._define(
                "index", number, f"values({self._next_seed()}, {max(rows, 1)}, dtype=torch.int64)", rows, "torch.int64"
            )
            return f"index{number}"
        return self._tensor(name, number, rows, dtype)

    def _tensor(self, name: str, number: int, rows: int, dtype: str) -> str:
        pick, seed = self._writer.pick, self._next_seed()
        known = [n for n, about in self._made.items() if about == (rows, dtype)]
        if known and "alias" not in self._without and pick((False, False, False, True)):
            other = pick(known)
            return str(pick((other, f"{other}.view({other}.shape)", f"{other}.flip(0)[:]")))
        if "alias" not in self._without and dtype == "torch.float32" and 0 < rows < 9 and pick((False,) * 11 + (True,)):
            return f"model.cache[:{rows}]" if pick((False, True)) else self._overlapping(name, number, rows)
        layout = pick((LAYOUTS[0],) * 5 + LAYOUTS[1:]) if "layouts" not in self._without else LAYOUTS[0]
        text = layout.format(seed=seed, n=rows)
        if dtype != "torch.float32":
            text = text.replace(")", f", dtype={dtype})", 1)
        self._define(name, number, text, rows, dtype)
        return f"{name}{number}"

    def _overlapping(self, name: str, number: int, rows: int) -> str:
        """A part of memory of which another argument may have another part."""
        base = f"base{number}"
        if base not in self._made:
            self._define("base", number, f"values({self._next_seed()}, {rows + 1}, 4)", rows + 1, "torch.float32")
            return f"{base}[1:]"
        return f"{base}[:-1]"

    def _define(self, name: str, number: int, text: str, rows: int, dtype: str) -> None:
        self._made[f"{name}{number}"] = (rows, dtype)
        self.lines.append(f"{name}{number} = {text}")

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


@st.composite
def programs(draw: Draw, without: Collection[str] = ()) -> Program:
    """A program that works in its first call, at least.

    Args:
        draw: hypothesis'.
        without: the :data:`GROUPS` of lines to leave out.
    """
    without = {*without, *_left_out(draw)}
    writer = _Writer(draw, without)
    weighted = [*PARAMETERS, *list(PARAMETERS)[:2] * 4]
    chosen = draw(st.lists(st.sampled_from(weighted), min_size=1, max_size=4))
    parameters = [parameter for parameter in PARAMETERS if parameter in chosen]
    calls = _Calls(writer, parameters, without)
    calls.write_call()
    writer.enter(parameters, calls.lines)
    for _ in range(writer.pick(range(1, 12))):
        writer.write_line()
    names = writer.names(lambda value: True)[::-1]
    results = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))
    for _ in range(writer.pick((2, 1, 3, 4, 5))):
        for _ in range(writer.pick((0, 0, 1, 2))):
            calls.write_event()
        calls.write_call()
    text = (*writer.body, *calls.lines)
    uses_model = any("self" in line or "model" in line for line in text)
    return Program(
        parameters=tuple(parameters),
        body=_without_dead_lookups(writer.body, results),
        results=results,
        shape=writer.pick(_shapes(len(results))),
        schedule=tuple(calls.lines),
        arguments=tuple(_compile_arguments(writer, parameters, calls)),
        mode=writer.pick(("no_grad", "no_grad", "no_grad", "inference")),
        door=writer.pick(("compile", "original"))
        if not uses_model
        else writer.pick(("compile", "original", "install")),
        is_function=not uses_model,
    )


def _without_dead_lookups(body: Sequence[str], results: Sequence[str]) -> tuple[str, ...]:
    """Without values that nobody reads and that may be looked up where there is nothing: tracers leave them out, and
    with them the error of a later call.
    """
    kept: list[str] = []
    for line in reversed(body):
        name = line.partition(" = ")[0]
        is_lookup = re.search(r"= \w+\[[a-z]\w*\]$|index_select|embedding", line) is not None
        if not is_lookup or any(re.search(rf"\b{name}\b", later) for later in (*kept, *results)):
            kept.append(line)
    return tuple(reversed(kept))


def _left_out(draw: Draw) -> Iterator[str]:
    """Every program leaves out other groups: what many kinds of lines hide from each other shows in few."""
    for group in GROUPS[1:]:
        if not draw(st.sampled_from((False,) * 5 + (True,) if group in _RARE else (True, True, False))):
            yield group
    if draw(st.booleans()):
        yield "layouts"
    else:
        yield "random"  # which number goes where depends on how a tensor lies in memory


def _shapes(length: int) -> list[str]:
    parts = [f"{{{i}}}" for i in range(length)]
    listed = ", ".join(parts)
    shapes = [f"({listed},)", f"[{listed}]", "{{" + ", ".join(f"'r{i}': {p}" for i, p in enumerate(parts)) + "}}"]
    shapes.append(f"{{{{'nested': ({listed},), 'none': None, 'number': 3}}}}")
    return ["{0}", *shapes] if length == 1 else shapes


def _compile_arguments(writer: _Writer, parameters: Sequence[str], calls: _Calls) -> Iterator[tuple[str, str]]:
    if any("Tensor" in parameter for parameter in parameters):
        sizes = writer.pick(("", "", "[8]", "[4, 8]", "[2, 16]"))
        if sizes:
            yield "capture_sizes", sizes
        if writer.pick((False, False, False, True)):
            yield "padding", "'never'"
    if "x: Tensor" in parameters and writer.pick((False, False, False, True)):
        yield "dynamic_dims", writer.pick(("{'x': 0}", "{'x': (0, 1)}", "{'x': 1}", "{}"))
    if writer.pick((False,) * 7 + (True,)):
        yield "options", "dict(clone_outputs=False)"
