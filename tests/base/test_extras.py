"""Parts that need packages which are missing, or too old."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from piecegraph.base import extras
from piecegraph.base.extras import OLDEST, require_extra
from piecegraph.errors import MissingPackageError
from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
sys.modules["transformers"] = None  # as if it were not installed
import piecegraph
from piecegraph.cli.main import main

told = {}
for name in ("LLM", "AsyncLLM"):
    try:
        getattr(piecegraph, name)
    except ImportError as error:
        told[name] = str(error)
for command in ("generate demo hello", "warm demo", "trace demo", "bench tiny"):
    sys.argv = ["piecegraph", *command.split()]
    try:
        main()
    except SystemExit as end:
        told[command] = end.code
for command in ("bench --module factory:make --modes eager --batch-size 2 --input-len 8 --repeats 1", "env"):
    sys.argv = ["piecegraph", *command.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
piecegraph.compile(len)
print(json.dumps(told))
"""

FACTORY = """
import torch

def make():
    return torch.nn.Linear(8, 8), lambda batch_size, input_len: {"input": torch.randn(batch_size, input_len)}
"""


def test_language_models_without_transformers(forked: ForkServer, tmp_path: Path) -> None:
    """They say so, and all else works."""
    (tmp_path / "factory.py").write_text(FACTORY)
    environment = {**os.environ, "PIECEGRAPH_CACHE": str(tmp_path / "cache")}
    done = forked.run("-c", PROGRAM, cwd=tmp_path, environment=environment)
    expected = 'PG615 transformers is not installed: language models need it. hint: pip install "piecegraph[llm]"'
    told = json.loads(done.stdout.splitlines()[-1])
    assert {told.pop(name) for name in ("LLM", "AsyncLLM")} == {expected}
    assert told == dict.fromkeys(("generate demo hello", "warm demo", "trace demo", "bench tiny"), 2)
    assert done.stderr.count(f"error: {expected}") == 4
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("found", "is_old"), [("4.57.1", True), ("5.9.0", True), ("5.17.0.dev0", False), (None, False)]
)
def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch, *, found: str | None, is_old: bool) -> None:
    """None: it was put on the path without being installed."""
    monkeypatch.setattr(extras, "installed_version", lambda package: found)
    if not is_old:
        require_extra("llm", ["transformers"], "language models need it")
        return
    with pytest.raises(MissingPackageError, match=f"PG615 transformers {found} is installed, which is older than 5.17"):
        require_extra("llm", ["transformers"], "language models need it")


def test_the_oldest_versions_are_those_of_the_project() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, version in OLDEST.items():
        assert any(re.match(rf"{package}>={version}[,;]?", each) for extra in wanted.values() for each in extra)
