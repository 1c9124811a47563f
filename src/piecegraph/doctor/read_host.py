"""What the operating system gives: memory, files, folders; and which packages are installed."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from piecegraph.base.environment import PACKAGES, installed_version
from piecegraph.doctor import facts
from piecegraph.doctor.machine import MODELS, Folder

MORE_PACKAGES = (
    "torchvision",
    "torchaudio",
    "pytorch-triton",
    "flashinfer-python",
    "flashinfer-jit-cache",
    *facts.NVSHMEM.values(),
)


def read_packages() -> dict[str, str]:
    """The installed versions, from what pip left on disk: nothing is imported."""
    found = {name: installed_version(name) for name in (*PACKAGES, *MORE_PACKAGES)}
    return {name: version for name, version in found.items() if version}


def read_pins() -> dict[str, str]:
    """The exact versions that torch, torchvision and torchaudio ask for."""
    asked = {"torch": "triton", "torchvision": "torch", "torchaudio": "torch"}
    found = {}
    for package, needed in asked.items():
        try:
            requirements = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        pin = parse_pin(requirements, needed)
        if pin:
            found[f"{package}>{needed}"] = pin
    return found


def parse_pin(requirements: Iterable[str], needed: str) -> str:
    """The exact version asked for, or an empty string.

    >>> parse_pin(["sympy>=1.13.3", "triton==3.6.0; platform_system == 'Linux'"], "triton")
    '3.6.0'
    """
    for requirement in requirements:
        exact = re.match(rf"(?:pytorch-)?{needed}\s*\(?\s*==\s*([\w.+]+)", requirement)
        if exact:
            return exact[1]
    return ""


def read_folders(environ: Mapping[str, str], packages: Mapping[str, str]) -> tuple[Folder, ...]:
    """The folders that compiled code, models and temporary files go to."""
    home = Path(environ.get("HOME", "~")).expanduser()
    caches = Path(environ.get("XDG_CACHE_HOME", home / ".cache"))
    temporary = Path(environ.get("TMPDIR", tempfile.gettempdir()))
    triton_home = Path(environ.get("TRITON_HOME", home))
    usual = {
        "TMPDIR": ("temporary files", temporary),
        "TORCHINDUCTOR_CACHE_DIR": ("Inductor cache", temporary / f"torchinductor_{_user()}"),
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
