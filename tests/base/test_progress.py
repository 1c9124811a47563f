"""Progress bars: on standard error, with what is being done, and nowhere else."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.base.progress import Progress
from tests.cases.modules import MLP


def test_a_bar_says_what_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True).bar("record", 2) as bar:
        bar.advance("size 8, 3.1 GiB free")
        bar.advance("size 4, 3.2 GiB free")
    out, err = capsys.readouterr()
    assert out == ""
    assert "record" in err
    assert "2/2" in err
    assert "size 4, 3.2 GiB free" in err


def test_nothing_is_shown_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        piecegraph.compile(MLP(), backend="eager").capture(torch.ones(8, 12))
    assert capsys.readouterr() == ("", "")


class _Writer:
    """As loggers put in the place of standard error."""

    def write(self, text: str) -> int:
        return len(text)


def _closed() -> Any:
    found = io.StringIO()
    found.close()
    return found


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [(None, "auto"), (None, True), (_closed(), "auto"), (_closed(), True), (_Writer(), "auto")],
    ids=["none", "none, but wanted", "closed", "closed, but wanted", "it only writes"],
)
def test_a_program_without_standard_error(stream: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    fast = piecegraph.compile(MLP(), backend="eager", options={"progress": wanted, "graph_device": "simulated"})
    with torch.no_grad():
        fast(torch.ones(8, 12))
    assert fast.stats()["coverage"] == 1.0
    assert not fast.stats()["events"]


def test_compiling_and_recording_show_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        piecegraph.compile(MLP(), backend="eager", options={"progress": True}).capture(torch.ones(8, 12))
    err = capsys.readouterr().err
    assert "compile" in err
    assert "record" in err
    assert "size 1" in err
