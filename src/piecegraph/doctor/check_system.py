"""What the operating system gives: memory, files, folders, and the environment variables that change what runs."""

from __future__ import annotations

import re
from collections.abc import Callable

from piecegraph.doctor import facts
from piecegraph.doctor.check_gpu import hides_all_gpus
from piecegraph.doctor.finding import Finding, FindingState, broken, joined, not_applicable, ok, warn
from piecegraph.doctor.machine import MODELS, Folder, Machine, numbers


def system(machine: Machine) -> Finding:
    """The operating system."""
    if machine.system == "Linux":
        return ok("system", "Linux")
    lost = "piecegraph is tested on Linux only, and these checks are made for it"
    return warn("system", f"{machine.system}: {facts.UNKNOWN}", lost, "use Linux, or WSL 2 on Windows")


def memory(machine: Machine) -> Finding:
    """Host memory, or the container's share of it."""
    name, size = "memory", machine.memory_bytes
    if size is None:
        return not_applicable(name, "its size cannot be read")
    if size < facts.ENOUGH_MEMORY_BYTES:
        lost = "loading a model or compiling with one process for each core may be ended by the kernel (Killed, -9)"
        mend = "give the container more memory, or export TORCHINDUCTOR_COMPILE_THREADS=2"
        return warn(name, _size(size), lost, mend)
    return ok(name, _size(size))


def shared_memory(machine: Machine) -> Finding:
    """``/dev/shm``, through which processes pass tensors and NCCL talks."""
    name, size = "/dev/shm", machine.shm_bytes
    mend = "start the container with --shm-size=8g or --ipc=host"
    lost = "several ranks or data-loading workers fail (NCCL: error while creating shared memory segment; Bus error)"
    if size is None:
        return warn(name, "not mounted", lost, mend)
    if size <= facts.DOCKER_SHM_BYTES and len(machine.gpus) > 1:
        return broken(name, f"{_size(size)} for {len(machine.gpus)} GPUs", lost, mend)
    if size < facts.ENOUGH_SHM_BYTES:
        return warn(name, _size(size), lost, mend)
    return ok(name, _size(size))


def open_files(machine: Machine) -> Finding:
    """How many files a process may have open."""
    name, limit = "open files", machine.open_files
    if limit is None:
        return ok(name, "no limit")
    if limit < facts.ENOUGH_OPEN_FILES:
        lost = "Too many open files, while compiling in many processes or loading a model of many files"
        return warn(name, f"at most {limit}", lost, "ulimit -n 65536")
    return ok(name, f"at most {limit}")


def cache_folders(machine: Machine) -> Finding:
    """Whether code can be written to the folders it is then loaded from, and by nobody else."""
    name = "cache folders"
    if not machine.folders:
        return not_applicable(name, "none known")
    found = [_judge(name, folder) for folder in machine.folders]
    if all(finding.state == "ok" for finding in found):
        return ok(name, f"{len(found)} writable: {', '.join(folder.path for folder in machine.folders)}")
    return joined(name, found)


def disk_space(machine: Machine) -> Finding:
    """Room where caches, models and temporary files go."""
    name = "disk space"
    used = [folder for folder in machine.folders if folder.variable != "TMPDIR" or folder.exists]
    known = [folder for folder in used if folder.free_bytes is not None and folder.is_writable]
    if not known:
        return not_applicable(name, "it cannot be read")
    tightest = min(known, key=lambda folder: folder.free_bytes or 0)
    free = tightest.free_bytes or 0
    evidence = f"{_size(free)} free at {tightest.path}"
    mend = f"make room, or point {tightest.variable} at a larger disk"
    if free < facts.FULL_DISK_BYTES:
        return broken(name, evidence, "No space left on device, while compiling or loading", mend)
    if free < facts.TIGHT_DISK_BYTES:
        return warn(name, evidence, "a model of some billion parameters does not fit", mend)
    return ok(name, evidence)


def variables(machine: Machine) -> Finding:
    """Environment variables that change what runs, or how fast."""
    name = "variables"
    found = [
        Finding(name, state, f"{variable}={machine.variables[variable]}", lost, f"unset {variable}")
        for variable, is_suspect, state, lost in SUSPECT
        if variable in machine.variables and is_suspect(machine.variables[variable])
    ]
    found += [*_library_path(name, machine), *_preloads(name, machine), *_two_allocators(name, machine)]
    if found:
        return joined(name, found)
    return ok(name, " ".join(f"{key}={value}" for key, value in machine.variables.items()) or "none set that matter")


def _is_on(value: str) -> bool:
    return value.strip().lower() not in {"", "0", "false", "no"}


# That TORCHDYNAMO_DISABLE leaves piecegraph alone was tried: it traces by itself.
SUSPECT: tuple[tuple[str, Callable[[str], bool], FindingState, str], ...] = (
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _is_on,
        "broken",
        "CUDA graphs cannot be captured: they need the allocator's pools",
    ),
    ("TRITON_INTERPRET", _is_on, "broken", "Triton kernels are interpreted in Python, a thousand times slower"),
    ("CUDA_LAUNCH_BLOCKING", _is_on, "warn", "every launch waits for the GPU: measured times mean nothing"),
    ("CUDA_VISIBLE_DEVICES", hides_all_gpus, "warn", "hides every GPU: pieces run on the CPU, without graphs"),
    (
        "TORCHDYNAMO_DISABLE",
        _is_on,
        "warn",
        "torch.compile does nothing: a baseline measured beside piecegraph is eager",
    ),
    (
        "TORCH_COMPILE_DISABLE",
        _is_on,
        "warn",
        "torch.compile does nothing: a baseline measured beside piecegraph is eager",
    ),
    ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _is_on, "warn", "every process compiles everything again"),
)


def _library_path(name: str, machine: Machine) -> list[Finding]:
    path = machine.variables.get("LD_LIBRARY_PATH", "")
    stubs = [part for part in path.split(":") if "stubs" in part.split("/")]
    if stubs and machine.gpus:
        lost = "libcuda.so is a stub there: CUDA driver is a stub library, no GPU is found"
        return [broken(name, f"LD_LIBRARY_PATH has {stubs[0]}", lost, "take the stubs folder out of LD_LIBRARY_PATH")]
    major = numbers(machine.torch.cuda)[:1]
    foreign = [found[0] for found in re.finditer(r"[^:]*/cuda-(\d+)[^:]*", path) if major and int(found[1]) != major[0]]
    if foreign:
        lost = f"libraries of another CUDA are loaded before those torch {machine.torch.version} was built with"
        return [warn(name, f"LD_LIBRARY_PATH has {foreign[0]}", lost, "unset LD_LIBRARY_PATH: wheels bring their own")]
    return []


def _preloads(name: str, machine: Machine) -> list[Finding]:
    lost = "it is not loaded, and every program says so on standard error"
    return [
        warn(name, f"LD_PRELOAD has {refused}", lost, "name a library that is there, or unset LD_PRELOAD")
        for refused in machine.refused_preloads
    ]


def _two_allocators(name: str, machine: Machine) -> list[Finding]:
    new, old = (machine.variables.get(key) for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if new is None or old is None or new == old:
        return []
    evidence = f"PYTORCH_ALLOC_CONF={new} and PYTORCH_CUDA_ALLOC_CONF={old}"
    return [warn(name, evidence, "only one of the two is used", "unset PYTORCH_CUDA_ALLOC_CONF, the older name")]


def _judge(name: str, folder: Folder) -> Finding:
    where = f"{folder.what} {folder.path}"
    mend = f"export {folder.variable}=$HOME/.cache/{folder.what.lower().replace(' ', '-')}"
    if folder.variable == "TMPDIR" and not folder.exists:
        lost = "nvcc and others fail to compile; Python takes /tmp in its place"
        return warn(name, f"TMPDIR={folder.path} is not there", lost, f"mkdir -p {folder.path}, or unset TMPDIR")
    if not folder.is_writable and folder.what == MODELS:
        return warn(name, f"{where} is not writable", "models that are not there yet cannot be fetched", mend)
    if not folder.is_writable:
        return broken(name, f"{where} is not writable", "nothing can be kept there: compiling or loading fails", mend)
    if not folder.is_mine or folder.others_may_write:
        why = "belongs to another user" if not folder.is_mine else "may be written by everybody"
        lost = "code that somebody else put there would be loaded and run"
        return warn(name, f"{where} {why}", lost, mend if not folder.is_mine else f"chmod o-w {folder.path}")
    if not folder.may_execute and folder.what != MODELS:
        lost = "compiled code cannot be loaded: failed to map segment from shared object"
        return broken(name, f"{where} is mounted noexec", lost, mend)
    return ok(name, where)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
