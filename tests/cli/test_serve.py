"""The command: a process that listens at once, tells when it is ready, and lets its requests end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from piecegraph.cli.main import group
from piecegraph.errors import ModelError
from piecegraph.llm import async_llm
from piecegraph.serve import server
from tests.cases.forked import ForkServer, Running
from tests.cases.tiny_llm import write_tiny_llm


@contextmanager
def started(forked: ForkServer, *words: str, **environment: str) -> Iterator[tuple[Running, str]]:
    """A process, and what it said when it was ready."""
    code = "from piecegraph.cli.main import main; main()"
    process = forked.start("-c", code, "serve", *words, cwd=Path.cwd(), environment={**os.environ, **environment})
    try:
        while not process.out and process.is_running:
            time.sleep(0.01)
        yield process, process.out
    finally:
        if process.is_running:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("num_processes", ["0", "2"])
def test_a_process_from_its_start_to_its_end(forked: ForkServer, tmp_path: Path, num_processes: str) -> None:
    folder = write_tiny_llm(tmp_path)
    words = (folder, "--model-name", "tiny", "--port", "0", "--device", "cpu", "--api-processes", num_processes)
    with started(forked, *words, PIECEGRAPH_API_KEY="secret") as (process, line):
        assert line.startswith("ready: tiny at http://127.0.0.1:"), process.err
        address = line.split()[-1]
        body = {"model": "tiny", "prompt": "ax", "max_tokens": 60, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            events = [answer.readline()]
            os.kill(process.pid, signal.SIGTERM)  # what was accepted is answered to its end
            events += answer.read().splitlines()
        found = [json.loads(each[6:]) for each in events if each.startswith(b"data: {")]
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        assert events[-2] == b"data: [DONE]"
        assert process.wait() == 0
        told = process.err
    lines = [json.loads(each) for each in told.splitlines() if each.startswith("{")]
    assert [(each["status"], each["new_tokens"]) for each in lines] == [(200, 60)]
    assert "secret" not in told


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    words = ["serve", str(tmp_path / "nowhere"), "--port", "0", "--host", "0.0.0.0", "--device", "cpu"]
    told = CliRunner().invoke(group, words)
    assert isinstance(told.exception, ModelError)
    assert told.exception.code == "PG661"
    assert "warning: 0.0.0.0 can be reached by others, and there is no --api-key" in told.output


def test_a_signal_while_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading cannot be stopped, so the process ends at once."""
    is_loaded, codes, before = threading.Event(), list[int](), signal.getsignal(signal.SIGTERM)

    def load(*_: Any, **__: Any) -> Any:
        while signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        is_loaded.wait(60)

    monkeypatch.setattr(async_llm, "AsyncLLM", load)
    monkeypatch.setattr(os, "_exit", codes.append)
    CliRunner().invoke(group, ["serve", "x", "--port", "0"])
    is_loaded.set()
    assert codes == [130]
    assert signal.getsignal(signal.SIGTERM) == before


def test_help_is_one_screen_and_imports_no_server() -> None:
    told = CliRunner().invoke(group, ["serve", "--help"])
    assert told.exit_code == 0
    assert len(told.output.splitlines()) < 45
    assert "--max-queue" in told.output
    code = "import sys; sys.argv = ['piecegraph', 'serve', '--help']\n"
    code += "from piecegraph.cli.main import group\ngroup(standalone_mode=False)\n"
    code += "assert not {'torch', 'fastapi', 'uvicorn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_wrong_calls() -> None:
    for words in (
        [],
        ["m", "--port", "70000"],
        ["m", "--max-queue", "0"],
        ["m", "--model", "path"],
        ["m", "--model", "m=path"],
        ["m", "--model", "n=path", "--memory-fraction", "0.5"],
        ["m", "--model", "n=path", "--memory-fraction", "0.9,0.2"],
        ["m", "--memory-fraction", "all"],
    ):
        assert CliRunner().invoke(group, ["serve", *words]).exit_code == 2, words


def test_models_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(*words: str) -> list[tuple[str, str, float | None]]:
        found: list[Any] = []
        monkeypatch.setattr(server, "serve", lambda _, specs, load, on_ready: found.extend(specs) or True)
        assert CliRunner().invoke(group, ["serve", "a/b", *words, "--device", "cpu"]).exit_code == 0
        return [(spec.name, spec.path, spec.memory_fraction) for spec in found]

    assert given() == [("a/b", "a/b", None)]
    assert given("--model", "n=c=d") == [("a/b", "a/b", 0.125), ("n", "c=d", 0.125)]
    both = "--model-name first --model second=path/to/second --memory-fraction 0.6,0.3"  # as docs/serve.md has it
    assert given(*both.split()) == [("first", "a/b", 0.6), ("second", "path/to/second", 0.3)]


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    told: Any = CliRunner().invoke(group, ["serve", "m"])
    assert "PG615 fastapi is not installed: the server needs it" in str(told.exception)
