"""Known issues of a user's own: given, kept in a folder, and tried out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.explain.catalogue import field_lines
from piecegraph.explain.check import check_file

GOOD = r'''
# what our team has met
[[issue]]
id = "acme-page-table-full"
title = "The page table of our cache is full"
exception = 'ValueError: page table of \d{1,9} entries is full'
frame = '(^|/)acme/kv/'
log_line = 'acme: page table exhausted'
meaning = "More sequences were admitted than the page table was made for."
fix = "Raise ACME_PAGES."
source = "seen with acme 2.3"
examples = ["""
Traceback (most recent call last):
  File "/srv/acme/kv/pages.py", line 12, in grow
    raise ValueError(f"page table of {n} entries is full")
ValueError: page table of 4096 entries is full
""", "12:00 acme: page table exhausted"]
counter_examples = ["""
Traceback (most recent call last):
  File "/srv/book/index.py", line 3, in grow
    raise ValueError("page table of 12 entries is full")
ValueError: page table of 12 entries is full
"""]
'''


def cli(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "XDG_CONFIG_HOME": str(home or "/nowhere"),
    }
    command = [sys.executable, "-m", "piecegraph", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    file = tmp_path / "team.toml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "run.log"
    file.write_text("12:00 acme: page table exhausted\n")
    return file


def test_a_good_file_is_tried_out(team: Path) -> None:
    done = cli("--check", str(team))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "acme-page-table-full: 2 examples and 1 counter-example\n"


def test_an_example_that_is_not_recognised(team: Path) -> None:
    team.write_text(GOOD.replace("exhausted'", "used up'").replace("(^|/)acme/kv/", "(^|/)book/"))
    done = cli("--check", str(team))
    assert done.returncode == 1
    first, second, third = done.stderr.splitlines()
    assert first == f"error: {team}, line 3 (acme-page-table-full): example 1 is not recognised"
    assert "example 2 is not recognised" in second
    assert "counter-example 1 is taken for it" in third


def test_an_example_that_another_entry_takes_says_which(team: Path) -> None:
    team.write_text(GOOD.replace("12:00 acme: page table exhausted", "Killed"))
    (problem,) = check_file(team).problems
    assert problem.endswith("example 2 is not recognised, but process-killed")


def test_every_wrong_entry_is_named_with_its_line(team: Path) -> None:
    wrong = GOOD.replace("acme-page-table-full", "other-one").replace("fix =", "fixx =")
    team.write_text(GOOD + wrong + GOOD.replace("{1,9}", "*").replace("table-full", "third"))
    checked = check_file(team)
    assert checked.entries == ("acme-page-table-full",)
    unknown, unbounded = checked.problems
    line = (GOOD + wrong).splitlines().index('fixx = "Raise ACME_PAGES."') + 1
    assert f"{team}, line {line}, entry 2 (other-one): unknown field 'fixx'. hint: did you mean 'fix'?" in unknown
    assert "entry 3 (acme-page-third): 'exception' has a repeat without an upper bound" in unbounded


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[issue]\n", "line 1"),
        (GOOD.replace("acme-page-table-full", "port-in-use"), "line 3: the id 'port-in-use' is taken, by known_issues"),
        (GOOD.replace("fix =", "refines = ['disk-ful']\nfix ="), "did you mean 'disk-full'?"),
        (GOOD.replace("'(^|/)acme/kv/'", r"'([a-z]{1,99}/){1,99}kv'"), "'frame' could take hours"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(team: Path, text: str, words: str) -> None:
    team.write_text(text)
    (problem,) = check_file(team).problems
    assert problem.startswith(f"PG120 a catalogue of known issues cannot be used at {team}")
    assert words in problem


def test_no_such_file(tmp_path: Path) -> None:
    done = cli("--check", str(tmp_path / "none.toml"))
    assert done.returncode == 1
    assert "none.toml: No such file or directory" in done.stderr


def test_files_that_are_given(team: Path, log: Path) -> None:
    other = team.with_name("other.toml")
    other.write_text(GOOD.replace("acme-page-table-full", "other-one").replace("exhausted", "gone"))
    done = cli(str(log), "--known", str(team), "--known", str(other))
    assert "known issue   The page table of our cache is full  (acme-page-table-full)" in done.stdout
    assert "other-one" not in done.stdout
    assert "other-one" in cli("--list", "--known", str(team), "--known", str(other)).stdout


def test_files_of_the_users_folder(team: Path, log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "piecegraph" / "known"
    folder.mkdir(parents=True)
    team.rename(folder / "team.toml")
    home = tmp_path / "config"
    assert "acme-page-table-full" in cli(str(log), home=home).stdout
    assert "acme-page-table-full" not in cli(str(log)).stdout
    assert cli("--check", str(folder / "team.toml"), home=home).returncode == 0, "it is not its own rival"
    (folder / "broken.toml").write_text("[[issue]")
    done = cli(str(log), home=home)
    assert done.returncode == 2
    assert "broken.toml" in done.stderr


def test_lines_of_fields_are_not_taken_from_strings() -> None:
    text = 'x = \'[[issue]]\'\n[[issue]] # id = 3\nfix = """\nid = 1\n"""\nid = \'a\'\n'
    assert field_lines(text) == ({"": 2, "fix": 3, "id": 6},)
