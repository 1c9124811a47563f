"""Processes that compile kernels, and what is done where they cannot."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.config
from torch._inductor import codecache
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import compile_tasks, triton_compat

from piecegraph.base import torch_compat
from piecegraph.base.torch_compat import compilers as compilers_module
from piecegraph.base.torch_compat import inductor

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")


def whose() -> int:
    return os.getpid()


def wait_long(parent: int) -> int:
    if os.getpid() != parent:
        time.sleep(60)
    return os.getpid()


def die(parent: int) -> int:
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_copies_do_what_they_are_given() -> None:
    pool = torch_compat.Compilers()
    try:
        assert pool.submit(whose).result() != os.getpid()
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result()
    finally:
        pool.close()


@pytest.mark.parametrize("job", [wait_long, die])
def test_what_a_copy_does_not_do_is_done_here(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a lock that nobody holds, and one that is killed: for want of memory, say."""
    monkeypatch.setattr(compilers_module, "_PATIENCE", 2.0 if job is wait_long else 60.0)
    pool, here = torch_compat.Compilers(), os.getpid()
    try:
        waiting = [pool.submit(job, here) for _ in range(20)]
        assert [one.result() for one in waiting] == [here] * 20
        with pytest.raises(BrokenExecutor):  # the others are gone with it
            pool.submit(whose).future.result()
        assert pool.submit(whose).result() == here
    finally:
        pool.close()


def test_what_cannot_be_sent_is_done_here() -> None:
    pool = torch_compat.Compilers()
    try:
        assert pool.submit(lambda: os.getpid()).result() == os.getpid()
    finally:
        pool.close()


def test_inductor_has_them_for_as_long_as_it_compiles() -> None:
    before = AsyncCompile.__dict__["process_pool"], AsyncCompile.__dict__["_ready_future"]
    with torch_compat.inductor_compilers():
        pool = AsyncCompile.process_pool()
        assert isinstance(pool, torch_compat.Compilers)
        assert AsyncCompile._ready_future is not None
        assert AsyncCompile._ready_future.done()
        with torch_compat.inductor_compilers():  # a plan of another
            assert AsyncCompile.process_pool() is pool
        copies = list((pool._pool._processes or {}).values())
        assert not any(wait([copy.sentinel], 0) for copy in copies)
    assert (AsyncCompile.__dict__["process_pool"], AsyncCompile.__dict__["_ready_future"]) == before
    assert all(wait([copy.sentinel], 10) for copy in copies)


def test_there_are_none_where_inductor_is_to_have_no_processes() -> None:
    """As ``TORCHINDUCTOR_COMPILE_THREADS=1`` has it."""
    before = AsyncCompile.__dict__["process_pool"]
    with torch._inductor.config.patch(compile_threads=1):  # type: ignore[attr-defined]
        assert torch_compat.fork_compilers() is None
        with torch_compat.inductor_compilers():
            assert AsyncCompile.__dict__["process_pool"] is before


def test_there_are_none_where_the_system_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made, fork = list[int](), os.fork

    def fork_once() -> int:
        if made:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        pid = fork()
        if pid:
            made.append(pid)
        return pid

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "fork", fork_once)
    with torch._inductor.config.patch(compile_threads=4):  # type: ignore[attr-defined]
        assert torch_compat.fork_compilers() is None
    deadline = time.monotonic() + 20
    while _is_running(made[0]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_signal_to_all_ends_a_copy_and_runs_nothing_of_ours(tmp_path: Path) -> None:
    """As systemd sends it to all processes of a service, whose handler lets requests end."""
    before = signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "ran").touch())
    pool = torch_compat.Compilers()
    try:
        pid = pool.submit(whose).result()
        (copy,) = (each for each in (pool._pool._processes or {}).values() if each.pid == pid)
        os.kill(pid, signal.SIGTERM)
        assert wait([copy.sentinel], 10)
        assert not (tmp_path / "ran").exists()
    finally:
        pool.close()
        signal.signal(signal.SIGTERM, before)


def test_copies_end_with_the_process_they_are_of() -> None:
    """They hold what it has open: the memory of a GPU would not be free before."""
    program = (
        "import os, time\n"
        "from piecegraph.base import torch_compat\n"
        "pool = torch_compat.Compilers()\n"
        "print(*(process.pid for process in pool._pool._processes.values()), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        copies = [int(word) for word in process.stdout.readline().split()]
        assert copies
        process.kill()
    deadline = time.monotonic() + 20
    while any(_is_running(copy) for copy in copies):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _source_of_triton() -> Any:
    from triton.compiler.compiler import ASTSource

    from piecegraph.llm.kernels import race_kernels

    kernel = race_kernels.first_largest_kernel
    types = {"largest": "*fp32", "places": "*i32", "out": "*i64", "num_parts": "i32"}
    constants = {"BAD": -1, "BLOCK": 16, **dict.fromkeys(kernel.arg_names[6:], False)}
    return ASTSource(kernel, {name: types.get(name, "constexpr") for name in kernel.arg_names}, constants)


def _source_of_gluon() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    from piecegraph.llm.kernels.attention import gluon_prefill
    from piecegraph.llm.kernels.gluon_boxes import box_layout

    kernel = gluon_prefill.prefill_kernel
    constants = {"WIDTH": 64, "TILE_HEADS": 2, "BLOCK_SIZE": 16, "BOX": 16}
    types = dict.fromkeys(("query_starts", "seq_lens", "block_table", "counters"), "*i32")
    types |= dict.fromkeys(("key_cache", "value_cache"), f"tensordesc<bf16[16, 64],{box_layout(2)!r}>")
    types |= {"q": f"tensordesc<bf16[32, 2, 64],{box_layout(3)!r}>", "out": "*bf16", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    return GluonASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)


def _source_of_gated() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    from piecegraph.llm.kernels import gluon_linear
    from piecegraph.llm.kernels.gluon_boxes import box_layout

    kernel = gluon_linear.gated_kernel
    constants = {"WIDTH": 128, "STAGES": 6}
    types = dict.fromkeys(("x", "weight", "out"), f"tensordesc<bf16[64, 64],{box_layout(2)!r}>")
    types |= dict.fromkeys(constants, "constexpr")
    return GluonASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)


@pytest.mark.parametrize("make_source", [_source_of_triton, _source_of_gluon, _source_of_gated])
def test_kernels_of_triton_are_compiled_by_copies(
    make_source: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``AsyncCompileMode`` of Triton has it: the second to ask finds it on disk."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.compiler.compiler")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", 90, 32)
    options = compiler.make_backend(target).parse_options({"num_warps": 4})
    env_vars: dict[str, str] = {}
    src = make_source()

    def compile_kernel() -> Any:
        return triton.compile(src, target=target, options=options.__dict__, _env_vars=env_vars)

    pool = torch_compat.Compilers()
    try:
        torch_compat.compile_by_copy(compile_kernel, pool)
    finally:
        pool.close()
    assert list(tmp_path.glob(f"*/{src.fn.__name__}.cubin"))
    monkeypatch.setattr(type(src), "make_ir", None)  # what compiles would call it
    assert compile_kernel().src is src


def _name_by_inductor() -> str:
    """What names of kernels hold of the assembler, where Inductor has one compiled."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    _set_triton_ptxas_path()
    return str(make_backend(GPUTarget("cuda", 90, 32)).hash())


@pytest.fixture
def _ptxas_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch with an assembler of its own, of another version than Triton's."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    torch_folder = tmp_path / "torch"
    for folder in (torch_folder, torch_folder / "_inductor"):  # torch 2.11 looks in the first, 2.13 in the second
        (folder / "bin").mkdir(parents=True)
        file = folder / "bin" / "ptxas"
        file.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.9, V99.9.1'\n")
        file.chmod(0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(torch_folder / "_inductor" / "runtime" / "compile_tasks.py"))
    monkeypatch.setattr(inductor, "_TORCH_FOLDER", str(torch_folder))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    caches = (compiler.get_ptxas_version, compile_tasks._set_triton_ptxas_path)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    os.environ.pop("TRITON_PTXAS_PATH", None)


def _name_by_a_copy() -> str:
    pool = torch_compat.Compilers()
    try:
        return str(pool.submit(_name_by_inductor).result())
    finally:
        pool.close()


@pytest.mark.usefixtures("_ptxas_of_torch")
def test_kernels_have_one_name_whoever_compiles_them(tmp_path: Path) -> None:
    """Otherwise a start would not find what another has kept, and compile it again."""
    assert "99.9" in _name_by_a_copy(), "as it is elsewhere"
    with torch_compat.compiler_folder(str(tmp_path)):
        name = _name_by_a_copy()
        assert "99.9" not in name
        assert _name_by_inductor() == name
    assert "TRITON_PTXAS_PATH" not in os.environ


@pytest.mark.usefixtures("_ptxas_of_torch")
def test_what_was_compiled_before_is_no_matter(tmp_path: Path) -> None:
    assert "99.9" in _name_by_inductor()
    with torch_compat.compiler_folder(str(tmp_path)):
        assert "99.9" not in _name_by_inductor()
        assert _name_by_a_copy() == _name_by_inductor()
    assert "99.9" in _name_by_inductor(), "it is left as it was"


def test_an_assembler_that_was_asked_for_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/cuda/bin/ptxas")
    with torch_compat.compiler_folder(str(tmp_path)):
        assert os.environ["TRITON_PTXAS_PATH"] == "/opt/cuda/bin/ptxas"
        assert torch_compat.compiler_settings()["TRITON_PTXAS_PATH"] == "/opt/cuda/bin/ptxas"


def test_only_what_needs_hashes_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_hashed = threading.Event(), threading.Event()

    def triton_key() -> None:
        assert goes_on.wait(10)
        is_hashed.set()

    monkeypatch.setattr(triton_compat, "HAS_TRITON", True)
    monkeypatch.setattr(triton_compat, "triton_key", triton_key)
    monkeypatch.setattr(codecache, "torch_key", lambda: b"")
    for begin in (torch_compat.hash_triton, torch_compat.hash_torch):
        begin.cache_clear()
        begin()
    threading.Timer(0.1, goes_on.set).start()
    assert not is_hashed.is_set()
    with contextlib.suppress(Exception):  # torch has none of this name
        torch_compat.load_compiled("no such artifact")
    assert is_hashed.is_set()
    torch_compat.hash_triton.cache_clear()
    torch_compat.hash_torch.cache_clear()
    is_hashed.clear()
    with contextlib.suppress(Exception):
        torch_compat.load_compiled("no such artifact")
    assert not is_hashed.is_set(), "nobody has asked for kernels"
