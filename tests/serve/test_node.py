"""The server and OpenAI's client for Node, as npm has it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import piecegraph
from tests.cases.serving import Served

CLIENT = "openai@6.49.0"
PROGRAM = Path(__file__).parents[1] / "cases" / "client.mjs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the client is installed."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no Node")
    found = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"]
    try:
        done = subprocess.run(
            [*command, "--prefix", ".", CLIENT], cwd=found, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer")
    if done.returncode:
        pytest.skip(f"npm cannot install it: {done.stderr[-200:]}")
    return found


def test_the_client_for_node(folder: Path, running: Served, tiny: piecegraph.LLM) -> None:
    program = shutil.copy(PROGRAM, folder)
    done = subprocess.run(
        ["node", program, running.address], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    chat = tiny.chat([{"role": "user", "content": "ax by"}], max_new_tokens=6)[0].text
    assert json.loads(done.stdout) == {
        "chat": chat,
        "streamed": chat,
        "completion": tiny.generate("ax by", max_new_tokens=6)[0].text,
        "response": chat,
        "responded": chat,
        "vector": 32,
        "models": ["tiny"],
        "error": [True, 404, "model_not_found"],
    }
