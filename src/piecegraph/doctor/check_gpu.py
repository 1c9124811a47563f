"""The GPUs, the driver, and whether torch's code runs on them."""

from __future__ import annotations

import re
from collections import Counter

from piecegraph.doctor import facts
from piecegraph.doctor.finding import Finding, broken, not_applicable, ok, warn
from piecegraph.doctor.machine import Gpu, Machine, minor, numbers

WITHOUT_A_GPU = "CUDA graphs; without a GPU, compiled pieces are called directly"


def gpu(machine: Machine) -> Finding:
    """Whether there is a GPU that a process may use."""
    name = "GPU"
    if not machine.gpus:
        if machine.driver:
            lost = "no program can use the GPU"
            mend = "a driver update usually needs a reboot (or rmmod and modprobe nvidia); see dmesg"
            return broken(name, f"driver {machine.driver} is loaded, but {machine.gpu_trouble}", lost, mend)
        return not_applicable(name, f"no GPU: {machine.gpu_trouble}", WITHOUT_A_GPU)
    evidence = "; ".join(_many(text, count) for text, count in Counter(map(_describe, machine.gpus)).items())
    modes = {gpu.compute_mode for gpu in machine.gpus}
    if "Prohibited" in modes:
        mend = "sudo nvidia-smi -c DEFAULT"
        return broken(name, f"{evidence}; compute mode Prohibited", "no process may use the GPU", mend)
    if "Exclusive_Process" in modes:
        lost = "a second process on the same GPU fails, such as one that tunes kernels"
        return warn(name, f"{evidence}; compute mode Exclusive_Process", lost, "sudo nvidia-smi -c DEFAULT")
    return ok(name, evidence)


def cuda_build(machine: Machine) -> Finding:
    """Whether torch is built for CUDA and can use the GPUs."""
    name, seen = "torch's CUDA", machine.torch
    if seen.state != "ok":
        return not_applicable(name, "torch cannot be imported")
    evidence = f"torch {seen.version}, CUDA {seen.cuda or 'none'}"
    if seen.hip:
        return warn(
            name, f"{evidence}, ROCm {seen.hip}: {facts.UNKNOWN}", "graphs are not recorded", "use an NVIDIA GPU"
        )
    if not machine.gpus:
        return not_applicable(name, evidence)
    chosen = machine.variables.get("CUDA_VISIBLE_DEVICES", "0")
    if hides_all_gpus(chosen):
        return not_applicable(name, f"CUDA_VISIBLE_DEVICES={chosen!r} hides every GPU", WITHOUT_A_GPU)
    if not seen.cuda:
        mend = f"install the CUDA build of torch {minor(seen.version)}: https://pytorch.org/get-started/locally"
        return broken(name, evidence, "the GPU is not used at all: no graphs, no GPU kernels", mend)
    if not seen.can_use_cuda:
        evidence = f"{evidence}; it cannot use the GPU: {seen.cuda_error or 'no reason given'}"
        mend = "see the driver's row; in a container, start it with --gpus all"
        return broken(name, evidence, "nothing runs on the GPU", mend)
    return ok(name, evidence)


def driver(machine: Machine) -> Finding:
    """Whether the driver is new enough for the CUDA that torch was built for."""
    name, cuda = "driver", machine.torch.cuda
    if not machine.gpus:
        return not_applicable(name, "no GPU")
    evidence = f"driver {machine.driver or 'unknown'}, up to CUDA {machine.driver_cuda or 'unknown'}"
    if not cuda:
        return not_applicable(name, evidence)
    evidence += f"; torch is built for CUDA {cuda}"
    major = numbers(cuda)[0]
    least = facts.MINIMUM_DRIVER.get(major)
    if least is None or not machine.driver:
        lost = "it is not known whether this driver runs it"
        return warn(name, f"{evidence}: {facts.UNKNOWN}", lost, "see the CUDA toolkit's release notes")
    if numbers(machine.driver) < numbers(least):
        older = f", or a torch built for CUDA {major - 1}" if major - 1 in facts.BUILT_MAJORS else ""
        mend = f"install driver {least} or later{older}"
        return broken(name, evidence, f"CUDA {major}.x needs driver {least}: torch finds no usable GPU", mend)
    if machine.driver_cuda and numbers(machine.driver_cuda) < numbers(cuda)[:2]:
        lost = (
            "runs by minor version compatibility: newer features are refused, and PTX from a newer nvcc does not load"
        )
        return warn(name, evidence, lost, f"install a driver for CUDA {minor(cuda)} or later")
    return ok(name, evidence)


def architecture(machine: Machine) -> Finding:
    """Whether torch has machine code for every GPU."""
    name, listed = "GPU architecture", machine.torch.architectures
    found = architectures(machine)
    if not found:
        return not_applicable(name, "no GPU whose architecture is known")
    old = [sm for sm in found if sm < facts.LOWEST_TRITON_ARCHITECTURE]
    if old:
        evidence = f"{_names(old)}; Triton starts at sm_{facts.LOWEST_TRITON_ARCHITECTURE}"
        mend = 'piecegraph.compile(..., backend="eager"), or a newer GPU'
        return broken(name, evidence, "Inductor refuses to compile for it", mend)
    if not listed:
        return not_applicable(name, f"{_names(found)}; torch tells its own list only where it can use a GPU")
    evidence = f"{_names(found)}; torch has {' '.join(listed)}"
    foreign = [sm for sm in found if not _runs(sm, listed)]
    if foreign:
        lost = f"no kernel image is available for execution on the device ({_names(foreign)})"
        first = max((facts.FIRST_TOOLKIT.get(sm, "") for sm in foreign), key=numbers)
        built = f" built for CUDA {first} or later" if first else ""
        return broken(name, evidence, lost, f"install a torch{built} that lists {_names(foreign)}")
    return ok(name, evidence)


def clocks(machine: Machine) -> Finding:
    """Whether the driver stays loaded, and how fast the GPUs run. Read only."""
    name = "clocks"
    known = [gpu for gpu in machine.gpus if gpu.clock_mhz is not None or gpu.persistence is not None]
    if not known:
        return not_applicable(name, "no GPU that tells its clocks", "how steady measured times are")
    slowest = min(known, key=lambda gpu: gpu.clock_mhz or 0)
    evidence = f"{slowest.clock_mhz or '?'} of {slowest.max_clock_mhz or '?'} MHz now"
    if any(gpu.persistence is False for gpu in known):
        lost = (
            "the driver is unloaded between runs: every start waits seconds for it, and clocks that were set are lost"
        )
        return warn(name, f"{evidence}; persistence mode off", lost, "sudo nvidia-smi -pm 1")
    return ok(name, f"{evidence}; persistence mode {'on' if slowest.persistence else 'not told'}")


def architectures(machine: Machine) -> list[int]:
    """The distinct architectures of the GPUs, lowest first."""
    return sorted({gpu.architecture for gpu in machine.gpus if gpu.architecture is not None})


def hides_all_gpus(visible_devices: str) -> bool:
    """Whether this value of ``CUDA_VISIBLE_DEVICES`` leaves no GPU."""
    return visible_devices.strip() in {"", "-1"}


def _runs(sm: int, listed: tuple[str, ...]) -> bool:
    """Machine code runs on later GPUs of the same generation; PTX is compiled for any later GPU."""
    for entry in listed:
        kind = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", entry)
        if kind is None:
            continue
        built = int(kind[2])
        if built == sm or (not kind[3] and built < sm and (kind[1] == "compute" or built // 10 == sm // 10)):
            return True
    return False


def _describe(gpu: Gpu) -> str:
    memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
    return f"{gpu.name}, {f'sm_{gpu.architecture}' if gpu.architecture else 'architecture unknown'}{memory}"


def _many(text: str, count: int) -> str:
    return text if count == 1 else f"{count} x {text}"


def _names(found: list[int]) -> str:
    return ", ".join(f"sm_{sm}" for sm in found)
