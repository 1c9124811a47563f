"""Packages beside torch: cuda-bindings, FlashInfer, and those with a part in Rust."""

from __future__ import annotations

from piecegraph.doctor import facts
from piecegraph.doctor.finding import Finding, not_applicable, ok, warn
from piecegraph.doctor.machine import Machine, numbers


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
