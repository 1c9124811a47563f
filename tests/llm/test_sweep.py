"""The sweep over families runs for real on a few of them, and the page that was committed says what it must."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]
REFUSALS = {
    "bart": r"model\.decoder: BartDecoder takes no position_ids",
    "deepseek_v32": r"layers\.0\.self_attn\.indexer: DeepseekV32Indexer chooses the tokens",
    "deepseek_v4": "compressed cache of its own",
    "doge": "DogeAttention of layer 0 brings a mask of its own",
    "gpt_neo": "does not go through transformers' AttentionInterface",
    "mpt": r"transformer\.blocks\.0\.attn: its attention does not go through",
    "roberta": r"roberta\.embeddings: RobertaEmbeddings derives the position of a token from padding",
}
RIGHT = {"llama4_text": "chunks, full", "opt": "full", "qwen2_moe": "window, full"}


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of the table in each section."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        found[section.splitlines()[0]] = [[cell.strip() for cell in row] for row in rows[2:]]
    return found


def sweep(forked: ForkServer, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("scripts/model_sweep.py", "--json", str(tmp_path / "sweep.json"), *arguments, cwd=ROOT)


def test_a_few_families(forked: ForkServer, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = sweep(forked, tmp_path, "--only", ",".join([*REFUSALS, *RIGHT]), "--page", str(page))
    assert done.returncode == 0, done.stderr[-2000:]
    families = json.loads((tmp_path / "sweep.json").read_text())["families"]
    for family, reason in REFUSALS.items():
        assert families[family]["verdict"] == "refused", families[family]
        assert families[family]["code"] == "PG662"
        assert re.search(reason, families[family]["reason"]), families[family]["reason"]
    for family, cache in RIGHT.items():
        assert families[family]["verdict"] == "right", families[family]
        assert families[family]["error"] < 1e-4
        assert families[family]["cache"] == cache
    found = tables(page.read_text())
    assert {row[0] for row in found["Right"]} == set(RIGHT)
    assert {row[0] for row in found["Refused"]} == set(REFUSALS)


def test_results_of_other_versions_are_not_continued(forked: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"versions": {"torch": "1"}, "families": {}}))
    done = sweep(forked, tmp_path)
    assert done.returncode == 2
    assert "was written with" in done.stderr


def test_the_committed_page() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    found = tables(page)
    right, refused, not_built = found["Right"], found["Refused"], found["Not built"]
    assert len(right) >= 85
    assert all(float(row[3]) <= 1e-2 for row in right)
    assert sum(float(row[3]) > 2e-3 for row in right) <= 1
    assert all(re.fullmatch("PG66[1-5]", row[1]) and row[2] for row in refused)
    assert len(not_built) <= 8
    counts = dict(re.findall(r"^\| (\w+).* \| (\d+) \|$", found_summary(page), re.MULTILINE))
    assert counts == {"right": str(len(right)), "refused": str(len(refused)), "wrong": "0", "not": str(len(not_built))}
    names = [row[0] for table in (right, refused, not_built) for row in table]
    assert len(names) == len(set(names)) >= 150


def found_summary(page: str) -> str:
    return page.partition("\n## ")[0]
