"""Replicas on a real Ray cluster, on this machine: one front, two engines, one of which is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from piecegraph.serve.ray import build_app
from tests.cases.serving import http
from tests.cases.tiny_llm import write_tiny_llm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    serve = pytest.importorskip("ray.serve")
    import ray
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from piecegraph.serve.ray.build import AppArgs
    from piecegraph.serve.ray.router import Beginnings

psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

LENGTH, NUM_RUNNING = 2048, 2


@contextlib.contextmanager
def cluster(port: int) -> Iterator[None]:
    """Ray on this machine, for this test and nobody else."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # a proxy that is slow to start is killed otherwise
        environment[f"RAY_SERVE_PROXY_{name}_TIMEOUT_S"] = "120"
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder)
        try:
            serve.start(http_options={"port": port})
            yield
        finally:
            serve.shutdown()
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    model = write_tiny_llm(tmp_path_factory.mktemp("model"), length=LENGTH)
    number = 20000 + os.getpid() % 10000
    args = {"model": model, "model_name": "tiny", "replicas": 2, "num_gpus": 0, "num_cpus": 0.5}
    how = {"max_num_seqs": NUM_RUNNING, "options": {"progress": False}}
    with cluster(number):
        serve.run(build_app({**args, "llm": how}), name="llm")
        yield number


def post(port: int, path: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def engines() -> list[int]:
    """The processes of the replicas."""
    return [
        each.pid
        for each in psutil.Process().children(recursive=True)
        if "ServeReplica:llm:engine" in " ".join(each.cmdline())
    ]


def test_one_front(port: int) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ax by"}], "max_tokens": 4, "temperature": 0}
    status, answer = post(port, "/v1/chat/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    status, answer = post(port, "/v1/messages", {**body, "model": "other"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert post(port, "/v1/completions", {"model": "tiny", "prompt": "a", "top_p": 7})[0] == 400
    assert post(port, "/v1/models/load", {"model": "x", "path": "y"})[1]["error"]["code"] == "no_admin"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as found:
        assert [each["id"] for each in json.load(found)["data"]] == ["tiny"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
    assert len(engines()) == 2


def test_a_prompt_goes_where_its_beginning_is(port: int) -> None:
    prompt = "ax by cz dx ey fz gx ay bz cx " * 20
    answers = [
        post(port, "/v1/completions", {"model": "tiny", "prompt": f"{prompt}{word}", "max_tokens": 1})[1]
        for word in ("ax", "by", "cz", "dx", "ey", "fz")
    ]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert min(cached[1:]) > 100


def test_a_folder_of_prompts_is_answered_once(
    port: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("pyarrow")
    from examples.ray_data import main

    model = write_tiny_llm(tmp_path_factory.mktemp("model"))
    prompts, answers = tmp_path / "prompts", tmp_path / "answers"
    prompts.mkdir()
    for name in "abc":
        (prompts / f"{name}.txt").write_text(f"{name}x {name}y")
    answers.mkdir()
    (answers / "b.json").write_text("{}")  # of a run before
    words = [model, str(prompts), str(answers), "--device", "cpu", "--max-new-tokens", "4"]
    told = [CliRunner().invoke(main, words, catch_exceptions=False).output for _ in range(2)]
    assert [each.splitlines()[-1] for each in told] == ["answered 2 prompts", "answered 0 prompts"]
    found = {path.name: json.loads(path.read_text()) for path in answers.iterdir()}
    assert sorted(found) == ["a.json", "b.json", "c.json"]
    assert found["b.json"] == {}
    assert all(found[name]["finish_reason"] == "length" and found[name]["text"] for name in ("a.json", "c.json"))


def test_an_engine_is_killed_under_load(port: int) -> None:
    body = {"model": "tiny", "prompt": "ax by", "max_tokens": 250, "temperature": 0}
    expected = post(port, "/v1/completions", body)[1]["choices"][0]["text"]
    victim, num_begun, is_time = engines()[0], 0, asyncio.Event()

    async def stream() -> tuple[str, str | None]:
        """Its text, and what the error was."""
        nonlocal num_begun
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http("/v1/completions", {**body, "stream": True}))
        text, error = "", None
        assert b" 200 " in await reader.readline()
        num_begun += 1
        if num_begun > NUM_RUNNING:  # both engines have begun
            is_time.set()
        while (line := await reader.readline()) != b"data: [DONE]\n":
            assert line, "the connection was cut"
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    error = event["error"]["code"]
                else:
                    text += event["choices"][0]["text"]
        writer.close()
        return text, error

    async def run() -> list[tuple[str, str | None]]:
        asked = [asyncio.ensure_future(stream()) for _ in range(4 * NUM_RUNNING)]
        await asyncio.wait_for(is_time.wait(), 60)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*asked), 120)

    found = asyncio.run(run())
    cut, whole = [each for each in found if each[1] is not None], [each for each in found if each[1] is None]
    assert all(text == expected for text, _ in whole)
    assert all(error == "engine_lost" and text and expected.startswith(text) for text, error in cut)
    assert 1 <= len(cut) <= NUM_RUNNING
    assert post(port, "/v1/completions", body)[1]["choices"][0]["text"] == expected


def test_beginnings() -> None:
    beginnings = Beginnings()
    beginnings.note("a" * 300, 1)
    beginnings.note("a" * 128 + "b" * 128, 2)
    assert beginnings.find("a" * 300 + "c") == 1
    assert beginnings.find("a" * 128 + "b" * 200) == 2
    assert beginnings.find("a" * 128 + "c" * 200) == 2  # whoever had it last
    assert beginnings.find("c" * 300) is beginnings.find("a" * 127) is None


def test_arguments() -> None:
    with pytest.raises(ValueError, match="replica_count"):
        build_app({"model": "m", "replica_count": 2})
    assert AppArgs(model="m", replicas={"max_replicas": 3}).replicas.target_ongoing_requests == 64  # type: ignore
    config = yaml.safe_load(Path("examples/ray_serve.yaml").read_text())
    (application,) = ServeDeploySchema(**config).applications
    assert application.import_path == "piecegraph.serve.ray:build_app"
    build_app(application.args)
