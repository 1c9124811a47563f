"""A model in files of its own, and a program that compiles it with the cache and tells what happened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.cases.forked import ForkServer

MODEL = """
import torch
from torch import Tensor, nn

import helpers

SCALE = 2.0

@torch.library.custom_op("pgcached::shift", mutates_args=())
def shift(x: Tensor) -> Tensor:
    return x + 1.0

@shift.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)

class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(width, width), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + helpers.squash(self.up(x)) * (SCALE * self.gain)

class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = shift(block(x))
        return x
"""

HELPERS = """
import torch

def squash(x):
    return torch.tanh(x)
"""

PROGRAM = """
import json, sys, warnings
import torch
import piecegraph
from model import Model

settings = json.loads(sys.argv[1])
if settings.get("compilers") == "refused":
    import torch._dynamo.convert_frame, torch._inductor.compile_fx, torch._inductor.cpp_builder

    def refuse(*args, **kwargs):
        raise AssertionError("a compiler was called")

    torch._dynamo.convert_frame.fullgraph_capture = refuse
    torch._inductor.compile_fx.compile_fx = torch._inductor.compile_fx.compile_fx_inner = refuse
    torch._inductor.cpp_builder.CppBuilder.build = refuse
    units = torch._inductor.cpu_vec_isa  # the process that this one is a copy of has tried them
    for holder in (units, *(each for each in vars(units).values() if isinstance(each, type))):
        for each in list(vars(holder).values()):
            getattr(each, "cache_clear", lambda: None)()
torch.manual_seed(0)
model, compiled = Model(), piecegraph.compile
exec(settings.get("before", ""))
fast = compiled(model, splitting_ops=["pgcached::shift"], on_fallback="ignore", **settings.get("arguments", {}))
with torch.no_grad():
    for size in (5, 3, 1):
        x = torch.randn(size, 8)
        torch.testing.assert_close(fast(x), model(x))
stats = fast.stats()
cache = [str(decision) for decision in fast.plan.decisions if decision.subject == "cache"]
files = sorted({step.first.file for step in fast.plan.steps if hasattr(step, "first") and step.first})
told = {"compiles": stats["compiles"], "events": stats["events"], "text": fast.explain(), "files": files}
print(json.dumps({"cache": cache, **told}))
"""


class CachedModel:
    """The files in a folder, and the cache beside them."""

    def __init__(self, forked: ForkServer, folder: Path) -> None:
        self._forked = forked
        self.folder = folder
        self.cache = folder / "cache"
        for name, text in (("model", MODEL), ("helpers", HELPERS), ("program", PROGRAM)):
            (folder / f"{name}.py").write_text(text)

    def run(self, **settings: Any) -> dict[str, Any]:
        """Compile and call it in a new process; arguments for ``compile`` are those of ``arguments``."""
        settings["arguments"] = {"backend": "eager", **settings.get("arguments", {})}
        environment = {**os.environ, "PIECEGRAPH_CACHE": str(self.cache), "PYTHONDONTWRITEBYTECODE": "1"}
        program = str(self.folder / "program.py")
        done = self._forked.run(program, json.dumps(settings), cwd=self.folder, environment=environment)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        (found["cache"],) = found["cache"]
        return found

    def edit(self, file: str, old: str, new: str) -> None:
        """Change one of the files."""
        path = self.folder / f"{file}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    @property
    def entry(self) -> Path:
        """The folder of the only entry."""
        (entry,) = (path for path in (self.cache / "plans").iterdir() if not path.name.startswith("."))
        return entry
