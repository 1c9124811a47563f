"""Compilers and assemblers, and what they say of themselves."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from piecegraph.doctor.commands import Shell
from piecegraph.doctor.machine import InstalledProgram, Toolkit
from piecegraph.doctor.read_packages import package_folder

CUDA_FOLDER = Path("/usr/local/cuda")


def read_program(shell: Shell, name: str) -> InstalledProgram | None:
    """A program on ``PATH`` or at a path, with the version it tells; ``None`` if there is none."""
    path = shell.find(name)
    if not path:
        return None
    result = shell.run([path, "--version"])
    version, family = parse_version(result.out)
    return InstalledProgram(path=path, version=version, family=family, trouble=result.trouble)


def parse_version(text: str) -> tuple[str, str]:
    """The version, and the family of a C compiler, in what ``--version`` printed.

    >>> parse_version("gcc (Debian 12.2.0-14+deb12u1) 12.2.0\\nCopyright (C) 2022 Free Software Foundation, Inc.")
    ('12.2.0', 'gcc')
    >>> parse_version("nvcc: NVIDIA (R) Cuda compiler driver\\nCuda compilation tools, release 12.4, V12.4.131")
    ('12.4', '')
    """
    release = re.search(r"release (\d+\.\d+)", text)
    if release:
        return release[1], ""
    first = text.strip().partition("\n")[0]
    # What stands in parentheses is the distribution's own numbering.
    version = re.search(r"\d+\.\d+(?:\.\d+)*", re.sub(r"\([^)]*\)", " ", first))
    family = "clang" if "clang" in text.lower() else "gcc" if "Free Software Foundation" in text else ""
    return version[0] if version else "", family


def read_c_compiler(shell: Shell) -> InstalledProgram | None:
    """What Triton calls to build its launchers."""
    return _named(shell, "CC") or read_program(shell, "gcc") or read_program(shell, "clang")


def read_cxx_compiler(shell: Shell) -> InstalledProgram | None:
    """What Inductor calls for C++."""
    return _named(shell, "CXX") or read_program(shell, "g++")


def read_older_gccs(shell: Shell) -> dict[str, str]:
    """Versions of gcc installed under their own names (``gcc-12``), by major version."""
    found: dict[str, str] = {}
    for folder in shell.environ.get("PATH", "").split(":"):
        for path in sorted(Path(folder).glob("gcc-*")) if folder else ():
            name = re.fullmatch(r"gcc-(\d+)", path.name)
            if name:
                found.setdefault(name[1], str(path))
    return found


def read_triton_ptxas(shell: Shell) -> InstalledProgram | None:
    """The assembler Triton uses; a path that is set but wrong is a program with trouble."""
    chosen = shell.environ.get("TRITON_PTXAS_PATH")
    if chosen:
        return read_program(shell, chosen) or InstalledProgram(path=chosen, trouble="is not there")
    folder = package_folder("triton")
    return read_program(shell, str(folder / "backends" / "nvidia" / "bin" / "ptxas")) if folder else None


def read_toolkit(shell: Shell) -> Toolkit | None:
    """The CUDA compiler that torch's extension builder would take: ``CUDA_HOME``, ``PATH``, then the usual folder."""
    home = shell.environ.get("CUDA_HOME") or shell.environ.get("CUDA_PATH")
    candidates = [str(Path(home) / "bin" / "nvcc")] if home else ["nvcc", str(CUDA_FOLDER / "bin" / "nvcc")]
    nvcc = next(filter(None, (read_program(shell, name) for name in candidates)), None)
    if nvcc is None:
        return None
    listed = shell.run([nvcc.path, "--list-gpu-arch"])
    architectures = tuple(int(number) for number in re.findall(r"compute_(\d+)\b", listed.out))
    planned = shell.run([nvcc.path, "--dryrun", "-x", "cu", "/dev/null"]).err
    host, root = parse_plan(planned)
    return Toolkit(
        nvcc=nvcc,
        architectures=architectures,
        host_compiler=read_program(shell, host) if host else None,
        highest_gcc=_highest_gcc(Path(root)) if root else None,
    )


def parse_plan(text: str) -> tuple[str, str]:
    """The host compiler and the toolkit's folder, from the commands that nvcc says it would run.

    nvcc on ``PATH`` may be a wrapper: only the plan tells where the toolkit really is.
    """
    root = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
    host = re.search(r"^#\$ (\S+) -D__CUDA_ARCH", text, re.MULTILINE)
    return host[1].replace('"', "") if host else "", root[1].strip() if root else ""


def _highest_gcc(root: Path) -> int | None:
    headers = [root / "include" / "crt" / "host_config.h", *root.glob("targets/*/include/crt/host_config.h")]
    for header in headers:
        try:
            limit = re.search(r"__GNUC__\s*>\s*(\d+)", header.read_text(errors="replace"))
        except OSError:
            continue
        if limit:
            return int(limit[1])
    return None


def _named(shell: Shell, variable: str) -> InstalledProgram | None:
    """The compiler that a variable names; one that is not there is a program with trouble."""
    words = _words(shell.environ.get(variable, ""))
    if not words:
        return None
    # "ccache gcc" names gcc.
    name = words[1] if Path(words[0]).name in {"ccache", "sccache", "distcc"} and len(words) > 1 else words[0]
    return read_program(shell, name) or InstalledProgram(path=name, trouble=f"is not there, but {variable} names it")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()
