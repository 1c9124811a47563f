"""Plans in another process: warm without any compiler, cold when anything has changed, whole or made again."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundler

import piecegraph
from piecegraph.base import entries, torch_compat
from piecegraph.base.describe import Describer
from piecegraph.base.torch_compat import inductor
from piecegraph.engine import plan_cache
from piecegraph.errors import CacheError, FallbackError
from tests.cases import modules
from tests.cases.cached import CachedModel
from tests.cases.decorated import pooled, scaled, scripted
from tests.cases.forked import ForkServer
from tests.cases.modules import Stack, attend_into


@pytest.fixture
def model(forked: ForkServer, tmp_path: Path) -> CachedModel:
    return CachedModel(forked, tmp_path)


def test_a_new_process_traces_nothing(model: CachedModel) -> None:
    cold = model.run()
    assert cold["cache"] == "cache: cold (nothing is kept of Model yet)"
    warm = model.run(compilers="refused")
    assert warm["cache"].startswith(f"cache: warm ({model.entry.name}, made ")
    assert warm["compiles"] == 0
    assert warm["events"] == cold["events"] == {}


def test_a_new_process_compiles_nothing_wherever_the_cache_lies(model: CachedModel, tmp_path: Path) -> None:
    arguments = {"backend": "inductor"}
    assert model.run(arguments=arguments)["compiles"] == 1
    model.cache.rename(tmp_path / "moved")
    model.cache = tmp_path / "moved"
    warm = model.run(arguments=arguments, compilers="refused")
    assert "cache: warm" in warm["cache"], warm["cache"]
    assert (warm["compiles"], warm["events"]) == (0, {})
    assert "piece (inductor)" in warm["text"]


def test_a_project_in_another_folder_finds_its_plans(forked: ForkServer, tmp_path: Path) -> None:
    """And names the lines of the files that are there."""
    (tmp_path / "here").mkdir()
    model = CachedModel(forked, tmp_path / "here")
    model.run()
    (tmp_path / "here").rename(tmp_path / "there")
    model.folder, model.cache = tmp_path / "there", tmp_path / "there" / "cache"
    warm = model.run(compilers="refused")
    assert "cache: warm" in warm["cache"], warm["cache"]
    assert warm["files"] == [str(tmp_path / "there" / "model.py")]


def test_edited_files(model: CachedModel) -> None:
    model.run()
    key = model.entry.name
    model.edit("helpers", "torch.tanh(x)", "torch.tanh(x * 1.5)")
    assert model.run()["cache"] == f"cache: cold (the code of helpers.squash is another since {key} was kept)"
    model.edit("model", "SCALE = 2.0", "SCALE = 3.0")
    assert model.run()["cache"].endswith(f"['SCALE'] is not 2.0 any more since {key} was kept)")
    model.edit("model", "return x + 1.0", "return x + 2.0")
    assert "the op pgcached::shift.default is another" in model.run()["cache"]
    model.edit("model", "x = shift(block(x))", "x = shift(shift(block(x)))")
    assert "classes: model.Model was " in model.run()["cache"]


# --- in one process, which is a new one to the cache


def call(module: nn.Module | None = None, **arguments: Any) -> tuple[str, dict[str, int]]:
    """What the cache says to a call, and what was lost; the result is compared."""
    torch.manual_seed(0)
    module = module or Stack(attend_into)
    fast = piecegraph.compile(module, **{"backend": "eager", "on_fallback": "ignore", **arguments})
    with torch.no_grad():
        for size in (5, 3):
            x = torch.randn(size, 12)
            torch.testing.assert_close(fast(x), module(x))
    return next(str(d) for d in fast.plan.decisions if d.subject == "cache"), fast.stats()["events"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry_of(root: Path) -> Path:
    (entry,) = (path for path in (root / "plans").iterdir() if not path.name.startswith("."))
    return entry


def test_what_is_damaged_is_made_again(root: Path) -> None:
    assert call() == ("cache: cold (nothing is kept of Stack yet)", {})
    for name, harm in (("trace.pickle", lambda b: b[:-9]), ("entry.json", lambda b: b.replace(b"eager", b"eagle"))):
        path = entry_of(root) / name
        path.write_bytes(harm(path.read_bytes()))
        told, events = call()
        key = entry_of(root).name
        assert told.startswith(f"cache: cold (entry {key} cannot be used: {name} is not what was written")
        assert events == {"PG674": 1}
        told, events = call()
        assert told.startswith(f"cache: warm ({key}, made ")
        assert events == {}


def test_an_entry_of_an_older_version_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(entries, "FORMAT", 0)
        call()
    told, events = call()
    assert "it is of format 0, and this version writes 1" in told
    assert events == {"PG674": 1}
    assert call()[0].startswith("cache: warm")


class Decorated(nn.Module):
    @scaled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pooled(scripted(x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Holds weak references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x)[0]  # type: ignore[no-any-return]


class Halves(NamedTuple):
    """Is made by code that Python generates."""

    first: torch.Tensor
    second: torch.Tensor


class InHalves(nn.Module):
    def forward(self, x: torch.Tensor) -> Halves:
        return Halves(*x.chunk(2, dim=1))


@pytest.mark.usefixtures("root")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [Decorated, Recurrent, InHalves])
def test_what_goes_by_other_names_is_kept(make: type[nn.Module]) -> None:
    assert call(make(), dynamic_dims={})[0].startswith("cache: cold (nothing is kept of ")
    assert call(make(), dynamic_dims={})[0].startswith("cache: warm (")


class Touchy:
    """Stands in for a module that is imported when it is asked for anything, and cannot be."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(f"nobody may ask for {name}")


class Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"nobody may ask for {name}")


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("make", [Decorated, InHalves])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_others_have_imported_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch, make: type[nn.Module]) -> None:
    """As six has modules of what is not installed, and Flask a request that is there in a request alone."""
    for number in range(2):
        lazy = Lazy(f"lazy{number}")
        vars(lazy).update(value=Touchy(), Holder=type("Holder", (), {"value": Touchy()}))
        monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
        monkeypatch.setitem(sys.modules, f"touchy{number}", Touchy())  # type: ignore[arg-type]
        assert call(make(), dynamic_dims={})[0].startswith(f"cache: {'warm' if number else 'cold'} (")


class Held:
    """Its text is not to be had."""

    def __repr__(self) -> str:
        raise ValueError("no text")


class Unreadable(dict[str, Any]):
    """Cannot be walked through."""

    def items(self) -> Any:
        raise ValueError("no items")


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("hold", "expected"),
    [(Unreadable, ["off (there is no key: held raises ValueError: no items)"] * 2), (Held, ["cold (", "warm ("])],
)
def test_a_module_that_holds_what_cannot_be_described(hold: Callable[[], Any], expected: list[str]) -> None:
    """An object is described by what it holds; a dictionary that cannot be walked through is no part of a key."""
    model = InHalves()
    model.held = hold()
    for each in expected:
        told, events = call(model, dynamic_dims={})
        assert told.startswith(f"cache: {each}")
        assert events == {}


class Holding(nn.Module):
    """Reads a weight where a list holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.held: list[torch.Tensor] = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.held[0])


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("find_other", [lambda model: model.second.weight, lambda model: torch.ones(12, 12)])
def test_a_weight_that_goes_by_another_name_is_another_one(find_other: Callable[[Holding], torch.Tensor]) -> None:
    call(Holding(), dynamic_dims={})
    model = Holding()
    model.held[0] = find_other(model)
    told, events = call(model, dynamic_dims={})
    assert told.startswith("cache: warm (")
    assert events == {}


def test_a_folder_that_others_may_write_to_is_refused(root: Path) -> None:
    call()
    root.chmod(0o777)
    told, events = call()
    assert told.startswith("cache: off (PG672 the cache folder ")
    assert "is not safe to use: others may write to it. hint: chmod go-w " in told
    assert events == {"PG672": 1}
    with pytest.raises(FallbackError, match="PG672"):
        call(on_fallback="raise")
    root.chmod(0o700)
    assert call()[0].startswith("cache: warm")


def test_a_folder_that_cannot_be_written_to(root: Path) -> None:
    root.write_text("a file")
    told, events = call()
    assert told.startswith("cache: off (PG673 ")
    assert events == {"PG673": 1}


def test_a_folder_that_can_only_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it lies in an image: what is there is used, and nobody writes down when."""
    call()
    monkeypatch.setattr(entries.os, "utime", _refuse_to_write)
    told, events = call()
    assert told.startswith("cache: warm")
    assert events == {}


def _refuse_to_write(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _keep_what_is_there(key: str) -> None:
    raise CacheError("PG673", "the cache folder cannot be used", why="Read-only file system")


@pytest.mark.parametrize("can_be_removed", [True, False])
def test_a_trace_that_is_wrong_is_found_out(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, can_be_removed: bool
) -> None:
    """Should something be missing in the key, the function itself still tells. The entry may still be there, or again:
    another process may have written it once more.
    """
    if not can_be_removed:
        monkeypatch.setattr(plan_cache, "remove_entry", _keep_what_is_there)
    monkeypatch.setattr(Describer, "code", lambda self, code: "the same")
    monkeypatch.setattr(modules.MLP, "forward", lambda self, x: x - self.down(self.up(x).sin()))
    call()
    told, events = call()
    assert told.startswith("cache: warm")
    monkeypatch.setattr(modules.MLP, "forward", lambda self, x: x + self.down(self.up(x).cos()))
    told, events = call()
    assert re.match(r"cache: cold \(entry \w+ cannot be used: a relative difference of ", told), told
    assert events == {"PG674": 1}
    assert call()[0].startswith("cache: warm")


def test_other_sizes_than_the_trace_is_for(root: Path) -> None:
    """A trace that took another branch is no use for this call, and is replaced."""

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 10 else x - 1

    for size, expected in ((20, "cold (nothing"), (30, "warm"), (5, "cold (the plan holds only where"), (7, "warm")):
        fast = piecegraph.compile(branches, backend="eager", dynamic_dims={"x": 0})
        assert torch.equal(fast(torch.ones(size)), branches(torch.ones(size)))
        assert f"cache: {expected}" in fast.explain()
        assert fast.stats()["events"] == {}


def test_ops_of_a_loaded_plan_can_be_intercepted(root: Path) -> None:
    """It is cut anew, from what is known of every value, and compiled where it must be."""
    call()
    module = Stack(attend_into)
    fast = piecegraph.compile(module, backend="eager")
    seen = []
    with torch.no_grad():
        expected = fast(torch.ones(5, 12))
        with piecegraph.intercept("aten::gelu", before=lambda ctx, *args: seen.append(args)):
            torch.testing.assert_close(fast(torch.ones(5, 12)), expected)
    assert "cache: warm" in fast.explain()
    assert len(seen) == 3


def test_a_plan_that_is_dumped_is_made_anew(root: Path, tmp_path: Path) -> None:
    """A dump shows how a plan is made."""
    call()
    told, _ = call(options={"dump": str(tmp_path / "dump")})
    assert told == "cache: off (a dump is asked for, which shows how a plan is made)"
    assert call()[0].startswith("cache: warm")


def test_what_is_switched_off_is_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = piecegraph.compile(torch.sin, backend="eager", options={"cache": False})
    fast(torch.ones(3))
    monkeypatch.setenv("PIECEGRAPH_CACHE", "off")
    fast = piecegraph.compile(torch.sin, backend="eager")
    fast(torch.ones(3))
    assert "cache:" not in fast.explain()
    assert not root.exists()


def test_kernels_of_triton_are_found_where_they_were_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    made, moved = tmp_path / "made", tmp_path / "moved"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(made / "triton"))
    manager = cache.FileCacheManager("a kernel")
    manager.put_group("add.json", {name: manager.put(b"code", name) for name in ("add.json", "add.cubin")})
    shutil.copytree(made, moved)
    shutil.rmtree(made)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved / "triton"))
    assert cache.FileCacheManager("a kernel").get_group("add.json") == {}, "this is why"
    torch_compat.settle_kernels(str(moved))
    found = cache.FileCacheManager("a kernel").get_group("add.json")
    assert {name: Path(path).read_bytes() for name, path in found.items()} == {
        "add.json": b"code",
        "add.cubin": b"code",
    }


def test_kernels_of_inductor_are_as_they_were_tuned_where_they_were_copied_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept before they are tuned; to what is found beside their source, whose path is kept with them."""
    triton = pytest.importorskip("triton")
    configs = [triton.Config({"XBLOCK": 4}), triton.Config({"XBLOCK": 8})]
    made, moved = tmp_path / "made", tmp_path / "moved"
    tuned = AutotuneCache.create({}, str(made / "ab" / "cab.py"), triton_heuristics.hash_configs(configs))
    tuned.save(configs[1], 1000)
    kernel = SimpleNamespace(filename=str(made / "ab" / "cab.py"), save_cache_hook=tuned.save, compile_results=[])
    shutil.copytree(made, moved)
    shutil.rmtree(made)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(moved))
    monkeypatch.setattr(CompiledTritonKernels, "_cache", {})

    def chosen() -> list[int]:
        found, _, _ = triton_heuristics.check_autotune_cache(configs, kernel.filename, {})
        return [config.kwargs["XBLOCK"] for config in found]

    assert chosen() == [4, 8], "this is why"
    with inductor._settled_tuning():
        TritonBundler.load_autotuners([StaticallyLaunchedAutotuner("key", "name", kernel)])
    assert chosen() == [8]
    kernel.save_cache_hook(configs[0], 1000)
    assert chosen() == [4]
    assert not made.exists(), "nor is anything written to where it was"
