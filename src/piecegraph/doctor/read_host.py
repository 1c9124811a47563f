"""What the machine gives: GPUs as the driver's own tool lists them, memory, files, folders. Nothing is set."""

from __future__ import annotations

import getpass
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from piecegraph.doctor.commands import Shell
from piecegraph.doctor.machine import MODELS, Folder, Gpu

GPU_FIELDS = (
    "name",
    "compute_cap",
    "memory.total",
    "persistence_mode",
    "clocks.sm",
    "clocks.max.sm",
    "compute_mode",
    "driver_version",
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def read_gpus(shell: Shell) -> tuple[tuple[Gpu, ...], str, str]:
    """The GPUs, the driver's version, and why none were listed."""
    tool = shell.find("nvidia-smi")
    if not tool:
        return (), _driver_of_kernel_module(), "nvidia-smi is not installed"
    result = shell.run([tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"])
    if result.trouble:
        return (), _driver_of_kernel_module(), f"nvidia-smi {result.trouble}"
    gpus, driver = parse_gpus(result.out)
    return gpus, driver or _driver_of_kernel_module(), "" if gpus else "nvidia-smi lists no GPU"


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs and the driver's version from the tool's table. Lines that are not of the table are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(GPU_FIELDS)]
    return tuple(map(_gpu, rows)), rows[0][-1] if rows else ""


def _gpu(row: list[str]) -> Gpu:
    name, capability, memory_mib, persistence, clock, max_clock, compute_mode, _ = row
    memory = _number(memory_mib)
    return Gpu(
        name=name,
        architecture=int(capability.replace(".", "")) if re.fullmatch(r"\d+\.\d", capability) else None,
        memory_bytes=memory * 2**20 if memory is not None else None,
        persistence={"Enabled": True, "Disabled": False}.get(persistence),
        clock_mhz=_number(clock),
        max_clock_mhz=_number(max_clock),
        compute_mode=compute_mode if compute_mode[:1].isalpha() else "",
    )


def _number(cell: str) -> int | None:
    # "[N/A]", "[Not Supported]", "[Unknown Error]" stand where a number cannot be read.
    return int(cell) if cell.isdecimal() else None


def _driver_of_kernel_module() -> str:
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", DRIVER_FILE.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def read_folders(environ: Mapping[str, str], packages: Mapping[str, str]) -> tuple[Folder, ...]:
    """The folders that compiled code, models and temporary files go to."""
    home = Path(environ.get("HOME", "~")).expanduser()
    caches = Path(environ.get("XDG_CACHE_HOME", home / ".cache"))
    temporary = Path(environ.get("TMPDIR", tempfile.gettempdir()))
    used = temporary if temporary.is_dir() else Path("/tmp")  # as Python falls back
    triton_home = Path(environ.get("TRITON_HOME", home))
    usual = {
        "TMPDIR": ("temporary files", temporary),
        "TORCHINDUCTOR_CACHE_DIR": ("Inductor cache", used / f"torchinductor_{_user()}"),
        "TRITON_CACHE_DIR": ("Triton cache", triton_home / ".triton" / "cache"),
        "HF_HOME": (MODELS, caches / "huggingface"),
    }
    if "flashinfer-python" in packages:
        base = Path(environ.get("FLASHINFER_WORKSPACE_BASE", home))
        usual["FLASHINFER_WORKSPACE_BASE"] = ("FlashInfer cache", base / ".cache" / "flashinfer")
    moved = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"} & environ.keys()
    return tuple(
        read_folder(what, Path(environ[variable]) if variable in moved else path, variable)
        for variable, (what, path) in usual.items()
    )


def read_folder(what: str, path: Path, variable: str) -> Folder:
    """Who may write to a folder, or to the nearest one above it that exists, and how much room there is."""
    exists = os.path.lexists(path)
    nearest = path
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        seen, room = nearest.stat(), os.statvfs(nearest)
    except OSError:  # a dangling link, a file system that does not answer
        return Folder(what=what, path=str(path), variable=variable, exists=exists, is_writable=False)
    is_open = bool(seen.st_mode & stat.S_IWOTH) and not seen.st_mode & stat.S_ISVTX
    return Folder(
        what=what,
        path=str(path),
        variable=variable,
        exists=exists,
        is_writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        is_mine=not exists or seen.st_uid in {os.geteuid(), 0},
        others_may_write=exists and is_open,
        may_execute=not room.f_flag & getattr(os, "ST_NOEXEC", 0),  # Linux only
        free_bytes=room.f_bavail * room.f_frsize,
    )


def read_shm_bytes(path: Path = Path("/dev/shm")) -> int | None:
    """The size of shared memory between processes."""
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize


def read_memory_bytes(root: Path = Path("/")) -> int | None:
    """The memory of the machine, or of the container where that is less."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        limits = []
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int((root / name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits, default=None)


def read_open_files() -> int | None:
    """How many files a process may have open."""
    try:
        import resource
    except ImportError:  # not on every system
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _user() -> str:
    # As Inductor names its folder.
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
