"""Python and its packages: torch, what must fit torch, cuda-bindings, FlashInfer, and those with a part in Rust."""

from __future__ import annotations

import re

from piecegraph.doctor import facts
from piecegraph.doctor.finding import Finding, broken, not_applicable, ok, warn
from piecegraph.doctor.machine import Machine, minor, numbers


def python(machine: Machine) -> Finding:
    """The interpreter's version and kind."""
    name, (first, end) = "Python", facts.PYTHON
    evidence = f"Python {machine.python}"
    mend = f"use Python {_dotted(first)} or 3.12: python3.12 -m venv .venv"
    if machine.is_free_threaded:
        lost = "packages without a free-threaded wheel are built from source, and piecegraph is not tested on it"
        return broken(name, f"{evidence}, free-threaded", lost, mend)
    if numbers(machine.python) < first:
        return broken(name, evidence, "piecegraph cannot be installed or imported", mend)
    if numbers(machine.python)[:2] >= end:
        lost = (
            "piecegraph does not install on it, and packages that have no wheel for it yet are built from source, "
            "which often stops at a missing Rust compiler"
        )
        return broken(name, evidence, lost, mend)
    return ok(name, evidence)


def torch(machine: Machine) -> Finding:
    """Whether torch can be imported, and is a version piecegraph works with."""
    name, seen, (first, end) = "torch", machine.torch, facts.TORCH
    installed = machine.packages.get("torch", "")
    mend = f'pip install "torch>={_dotted(first)},<{_dotted(end)}"'
    if seen.state == "missing":
        return broken(name, "torch is not installed", "nothing of piecegraph runs", mend)
    if seen.state != "ok":
        evidence = f"torch {installed or '(no metadata)'}: import {seen.state}: {seen.error}"
        again = f"python -c 'import torch' shows it; install torch afresh: {mend} --force-reinstall"
        return broken(name, evidence, "nothing of piecegraph runs", again)
    evidence = f"torch {seen.version}" + (f" built in {seen.location}" if is_self_built(machine) else "")
    if installed and numbers(installed) != numbers(seen.version):
        lost = "another torch is imported than the one pip knows of: what pip installs next is made for the wrong one"
        evidence = f"{evidence} is imported from {seen.location}, but {installed} is installed"
        return warn(name, evidence, lost, "remove one of them: pip uninstall torch, or unset PYTHONPATH")
    if numbers(seen.version)[:2] < first:
        return broken(name, evidence, "piecegraph uses what only later versions have", mend)
    if numbers(seen.version)[:2] >= end:
        lost = "names of torch's that piecegraph relies on may be gone"
        return warn(name, f"{evidence}: {facts.UNKNOWN}", lost, mend)
    if seen.cxx11_abi is False:
        # https://github.com/pytorch/pytorch/releases/tag/v2.7.0: all Linux wheels since are built with the new ABI.
        lost = "wheels made for torch do not load: undefined symbol"
        mend = "build torch with _GLIBCXX_USE_CXX11_ABI=1, or build those packages here"
        return warn(name, f"{evidence} with the old C++ ABI", lost, mend)
    return ok(name, evidence)


def torchvision(machine: Machine) -> Finding:
    """Whether torchvision is the one for this torch."""
    lost = "importing it fails (operator torchvision::nms does not exist), and transformers with it"
    return _pair(machine, "torchvision", facts.TORCHVISION, lost)


def torchaudio(machine: Machine) -> Finding:
    """Whether torchaudio is one for this torch."""
    return _pair(machine, "torchaudio", facts.TORCHAUDIO, "importing it fails with an undefined symbol")


def triton(machine: Machine) -> Finding:
    """Whether Triton is the one that torch's Inductor was made with."""
    name, seen = "Triton", machine.torch
    if not seen.cuda:
        return not_applicable(name, "torch is no CUDA build: Inductor writes C++, not Triton", "Inductor's GPU kernels")
    installed = machine.packages.get("triton") or machine.packages.get("pytorch-triton")
    wanted = machine.pins.get("torch>triton") or facts.TRITON.get(minor(seen.version), "")
    mend = f"pip install triton=={wanted}" + ("" if wanted.count(".") == 2 else ".*")
    if not installed:
        mend = mend if wanted else "install the Triton that this torch was built with"
        return broken(name, "Triton is not installed", "Inductor cannot compile for the GPU", mend)
    evidence = f"Triton {installed} with torch {seen.version}"
    if not wanted:
        lost = "Inductor may call what this Triton does not have"
        return warn(name, f"{evidence}: {facts.UNKNOWN}", lost, "compare with what torch's own release names")
    if numbers(installed)[:2] != numbers(wanted)[:2]:
        lost = "Inductor calls Triton's inner functions, which change from one minor version to the next"
        return broken(name, f"{evidence}, which wants {wanted}", lost, mend)
    if wanted.count(".") == 2 and numbers(installed) != numbers(wanted):
        return warn(name, f"{evidence}, which wants {wanted}", "torch was tested with another patch version", mend)
    return ok(name, evidence)


def cuda_bindings(machine: Machine) -> Finding:
    """Whether a graph can be read while it is captured."""
    name, seen = "cuda-bindings", machine.cuda_bindings
    installed = machine.packages.get("cuda-bindings", "")
    lost = "kernels inside a graph cannot be traced to the line that launched them"
    if not machine.gpus:
        evidence = f"cuda-bindings {installed}" if installed else "not installed"
        return not_applicable(name, evidence, "tracing kernels inside a graph to the line that launched them")
    major = next(iter(numbers(machine.driver_cuda or machine.torch.cuda)), 0)
    mend = f'pip install "cuda-bindings=={major}.*"' if major in facts.BUILT_MAJORS else "pip install cuda-bindings"
    if seen.state == "missing":
        return warn(name, "not installed", lost, mend)
    if seen.state != "ok":
        return warn(name, f"cuda-bindings {installed}: import {seen.state}: {seen.error}", lost, mend)
    if seen.missing:
        return warn(name, f"cuda-bindings {installed} lacks {', '.join(seen.missing)}", lost, f"{mend} --upgrade")
    # https://nvidia.github.io/cuda-python/cuda-bindings/latest/support.html: compatible within a major version, and
    # a newer driver serves older bindings.
    if machine.driver_cuda and numbers(installed)[:1] > numbers(machine.driver_cuda)[:1]:
        evidence = f"cuda-bindings {installed} on a driver for CUDA {machine.driver_cuda}"
        return warn(name, evidence, lost, mend)
    return ok(name, f"cuda-bindings {installed}")


def flashinfer(machine: Machine) -> Finding:
    """Whether FlashInfer has what it looks for."""
    name, installed = "FlashInfer", machine.packages.get("flashinfer-python", "")
    if not installed:
        return not_applicable(name, "not installed")
    major = next(iter(numbers(machine.torch.cuda)), 0)
    wanted = facts.NVSHMEM.get(major, "")
    if wanted and wanted not in machine.packages:
        evidence = f"flashinfer-python {installed} without {wanted}"
        lost = "No module named 'nvidia.nvshmem': its modules cannot be registered, and building them all stops"
        return warn(name, evidence, lost, f"pip install {wanted}")
    if machine.toolkit is None and "flashinfer-jit-cache" not in machine.packages:
        evidence = f"flashinfer-python {installed} without nvcc and without flashinfer-jit-cache"
        lost = "the first use of each kernel fails: it is compiled then"
        return warn(name, evidence, lost, "install the CUDA toolkit, or flashinfer-jit-cache of the same version")
    return ok(name, f"flashinfer-python {installed}" + (f", {wanted} {machine.packages[wanted]}" if wanted else ""))


def rust(machine: Machine) -> Finding:
    """A Rust compiler, for packages that are built from source."""
    name = "Rust"
    if machine.rustc and not machine.rustc.trouble:
        return ok(name, f"rustc {machine.rustc.version}")
    evidence = "no rustc" if machine.rustc is None else f"{machine.rustc.path} {machine.rustc.trouble}"
    packages = ", ".join(facts.RUST_PACKAGES)
    if numbers(machine.python)[:2] >= facts.PYTHON[1]:
        lost = f"can't find Rust compiler: {packages} and sglang are built where no wheel fits Python {machine.python}"
        return warn(name, evidence, lost, "use Python 3.11 or 3.12, which have wheels; or install Rust from rustup.rs")
    return not_applicable(name, evidence, f"building {packages} or sglang from source; on this Python they have wheels")


def is_self_built(machine: Machine) -> bool:
    """Whether this torch was built on this machine, or in a vendor's image: pip cannot fetch its like.

    Release wheels are called ``2.11.0``, ``2.11.0+cu130`` or ``2.11.0+cpu``; one's own build ``2.8.0a0+gitba56102``.
    """
    version = machine.torch.version or machine.packages.get("torch", "")
    release = re.fullmatch(r"[\d.]+(?:\.dev\d+)?(?:\+(?:cpu|cu\d+|rocm[\d.]+|xpu)(?:\.\w+)*)?", version)
    return machine.torch.is_checkout or (bool(version) and release is None)


def _pair(machine: Machine, package: str, table: dict[str, str], lost: str) -> Finding:
    version = machine.torch.version or machine.packages.get("torch", "")
    installed = machine.packages.get(package, "")
    wanted, own = table.get(minor(version), ""), is_self_built(machine)
    command = f"pip install {package}=={wanted}.0" + (" --no-deps" if own else "") if wanted else ""
    if not installed:
        later = f"; with this self-built torch: {command}" if own and command else ""
        return not_applicable(package, f"not installed{later}")
    evidence = f"{package} {installed} with torch {version or '(not installed)'}"
    if own and command:
        command += " (without --no-deps pip would replace the self-built torch)"
    pin = machine.pins.get(f"{package}>torch", "")
    fits = numbers(pin) == numbers(version) if pin else minor(installed) == wanted if wanted else None
    if fits is None:
        return warn(package, f"{evidence}: {facts.UNKNOWN}", lost, f"see the table in {package}'s README")
    if not fits:
        asks = f"asks for torch {pin}" if pin else f"is not {wanted}, the one for this torch"
        evidence = f"{package} {installed} {asks}; torch is {version}"
        return broken(package, evidence, lost, command or f"install the {package} made for this torch")
    if _build(installed) and _build(version) and _build(installed) != _build(version):
        evidence += ": one is built for the CPU or another CUDA"
        return broken(package, evidence, lost, "install both from the same index: they carry the same +cu or +cpu")
    return ok(package, evidence)


def _build(version: str) -> str:
    """``cpu`` or ``cu13``, the part of a wheel's build that must agree; empty where the version does not say."""
    tag = re.search(r"\+(cpu|cu\d\d)", version)
    return tag[1] if tag else ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
