"""Reading a profile that torch.profiler wrote, of any program."""

from __future__ import annotations

import os
from typing import Any, Literal

from piecegraph.base.progress import Progress
from piecegraph.errors import InputError
from piecegraph.provenance.launch import KernelProfile
from piecegraph.provenance.profile.attribute import attribute
from piecegraph.provenance.profile.file import ProfileFile
from piecegraph.provenance.profile.join import RawProfile, join
from piecegraph.provenance.profile.saved import saved_profile
from piecegraph.provenance.profile.timeline import Timeline, collect

_MEGABYTE = 1_000_000
_LONG_FILE_BYTES = 20 * _MEGABYTE


def read_profile(path: str | os.PathLike[str], *, progress: bool | Literal["auto"] = "auto") -> KernelProfile:
    """Read a Chrome trace of torch.profiler, plain or gzip, of any size; one that we saved as we knew it.

    Args:
        path: what ``export_chrome_trace()`` wrote.
        progress: whether to show a bar for long files on standard error; ``"auto"``: if that is a terminal.

    Raises:
        InputError: the file cannot be used; nothing is returned of a file that is not whole.
    """
    file = ProfileFile(os.fspath(path))
    timeline = _collect(file, progress)
    return saved_profile(file.saved, file.path) or attribute(*_launches(file, timeline))


def read_launches(
    path: str | os.PathLike[str], *, progress: bool | Literal["auto"] = "auto", may_be_empty: bool = False
) -> tuple[RawProfile, str]:
    """The launches of a profile as it tells them, and the name of the GPU."""
    file = ProfileFile(os.fspath(path))
    return _launches(file, _collect(file, progress), may_be_empty=may_be_empty)


def _launches(file: ProfileFile, timeline: Timeline, *, may_be_empty: bool = False) -> tuple[RawProfile, str]:
    profile = join(timeline)
    if not profile.launches and not may_be_empty:
        raise InputError(
            "PG704",
            "no trace events of ops or kernels",
            where=file.path,
            why=f"none of its {file.num_events:,} events is one",
            hint="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], around code that runs",
        )
    return profile, _device_name(file.device_properties, profile.device_ids)


def _collect(file: ProfileFile, progress: bool | Literal["auto"]) -> Timeline:
    num_bytes = file.num_bytes
    total = num_bytes // _MEGABYTE if num_bytes >= _LONG_FILE_BYTES else 0
    with Progress(progress).bar("reading", total) as bar:
        num_shown = 0

        def show(position: int) -> None:
            nonlocal num_shown
            while num_shown < min(position // _MEGABYTE, total):
                num_shown += 1
                bar.advance("MB")

        return collect(file.batches(show))


def _device_name(properties: list[dict[str, Any]], device_ids: tuple[int, ...]) -> str:
    """Of the GPUs that something ran on; the file lists all there are."""
    used = [str(one.get("name", "")) for one in properties if one.get("id") in device_ids]
    return ", ".join(dict.fromkeys(name for name in used if name))
