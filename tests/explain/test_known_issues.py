"""The catalogue: every entry names what it should, nothing else, and quickly; a wrong file is refused with a reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from piecegraph.errors import ConfigError
from piecegraph.explain.catalogue import load_catalogue, parse_catalogue
from piecegraph.explain.evidence import Failure, Frame, Raised
from piecegraph.explain.known_issues import (
    KnownIssue,
    describe,
    find_matches,
    log_line_matcher,
    match_known_issues,
    watched_words,
)
from tests.cases.known_failures import COUNTER_EXAMPLES, EXAMPLES, LINES, NEAR_MISSES, QUIET_LINES
from tests.cases.real_failures import REAL

CATALOGUE = load_catalogue()
DOCS = Path(__file__).parents[2] / "docs"


def raised(text: str, frames: list[str], link: str = "") -> Raised:
    kind, _, message = text.partition(": ")
    split = [frame.rpartition(":") for frame in frames]
    return Raised(type=kind, message=message, frames=tuple(Frame(f, 1, name) for f, _, name in split), link=link)  # type: ignore[arg-type]


def ids(*chain: Raised, lines: list[str] = []) -> list[str]:  # noqa: B006
    return [issue.id for issue in match_known_issues(Failure(chain=chain), CATALOGUE, lines)]


@pytest.mark.parametrize(("expected", "text", "frames"), EXAMPLES, ids=[f"{e[0]}-{n}" for n, e in enumerate(EXAMPLES)])
def test_the_intended_entry_is_first_and_the_rest_are_what_it_refines(
    expected: str, text: str, frames: list[str]
) -> None:
    found = ids(raised(text, frames))
    assert found[:1] == [expected]
    assert set(found[1:]) <= ancestors(expected)


def ancestors(name: str) -> set[str]:
    direct = next(issue for issue in CATALOGUE if issue.id == name).refines
    return {*direct, *(above for one in direct for above in ancestors(one))}


@pytest.mark.parametrize(("expected", "line"), LINES, ids=[f"{e[0]}-{n}" for n, e in enumerate(LINES)])
def test_a_line_of_the_log_names_its_entry(expected: str, line: str) -> None:
    first, *more = [issue.id for issue in log_line_matcher(CATALOGUE)(line)]
    assert first == expected
    assert set(more) <= ancestors(expected)
    assert ids(lines=["unrelated", line])[0] == expected


@pytest.mark.parametrize(("text", "frames"), NEAR_MISSES, ids=[text[:40] for text, _ in NEAR_MISSES])
def test_a_near_miss_names_nothing(text: str, frames: list[str]) -> None:
    assert ids(raised(text, frames)) == []


@pytest.mark.parametrize("line", QUIET_LINES)
def test_an_ordinary_line_names_nothing(line: str) -> None:
    assert log_line_matcher(CATALOGUE)(line) == ()


def test_every_entry_has_an_example() -> None:
    assert {issue.id for issue in CATALOGUE if issue.exception} == {name for name, *_ in [*EXAMPLES, *REAL]}
    lines = {name for name, _ in LINES}
    assert {issue.id for issue in CATALOGUE if issue.log_line} == lines


@pytest.mark.parametrize("name", sorted(COUNTER_EXAMPLES))
def test_words_that_only_look_like_it_name_nothing(name: str) -> None:
    assert ids(raised(COUNTER_EXAMPLES[name], ["/elsewhere.py:main"])) == []


def test_every_entry_has_a_counter_example() -> None:
    """Where a frame is asked for, the same words from elsewhere are one: see the next test."""
    missing = {issue.id for issue in CATALOGUE if issue.frame_free} - set(COUNTER_EXAMPLES)
    assert missing == {"cuda-memory-fragmented", "terminated"}, "those have their own tests"


def test_memory_is_called_fragmented_only_if_more_is_unused_than_was_asked_for() -> None:
    words = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. {} is reserved by PyTorch but unallocated"
    )
    frames = ["/srv/m.py:f"]
    assert ids(raised(words.format("96.00 MiB", "17.11 GiB"), frames))[0] == "cuda-memory-fragmented"
    assert ids(raised(words.format("260.00 MiB", "18.53 MiB"), frames)) == ["cuda-out-of-memory"]
    assert ids(raised(words.format("20.00 GiB", "1.53 GiB"), frames)) == ["cuda-out-of-memory"]


def test_a_signal_that_ends_another_process_is_not_taken_for_the_end_of_this_one() -> None:
    assert ids(raised("acme.SignalException: Process 4242 got signal: 150", ["/srv/m.py:f"])) == []


def test_examples_need_their_frame() -> None:
    """Take the frames away: only entries that say why they need none may still speak."""
    for _, text, _ in EXAMPLES:
        for issue in match_known_issues(Failure(chain=(raised(text, ["/elsewhere.py:main"]),)), CATALOGUE):
            assert issue.frame_free, issue.id


def test_entries_are_written_out() -> None:
    assert len(CATALOGUE) >= 145
    for issue in CATALOGUE:
        assert issue.meaning.endswith("."), issue.id
        assert issue.fix.endswith((".", ":.")), issue.id
        assert issue.source.startswith(("https://", "seen with ")), issue.id
        assert bool(issue.frame) != bool(issue.frame_free) or issue.exception is None, issue.id


class TestOrder:
    def test_the_wrapper_of_an_engine_hides_nothing(self) -> None:
        """An engine catches the compiler's failure and raises its own, which quotes it."""
        _, text, frames = next(example for example in EXAMPLES if example[0] == "thunder-cuda-stream")
        inner = raised(text, frames)
        outer = raised(f"Exception: Capture cuda graph failed: {inner.message}", ["/sglang/r.py:__init__"], "context")
        assert ids(inner, outer) == ["thunder-cuda-stream", "backend-compiler-failed"]

    def test_a_cause_comes_before_its_echo(self) -> None:
        cause = raised(
            "RuntimeError: CUDA error: operation not permitted when stream is capturing", ["/srv/m.py:forward"]
        )
        echo = raised(
            "RuntimeError: CUDA error: operation failed due to a previous error during capture",
            ["/g.py:end"],
            "context",
        )
        assert ids(cause, echo) == ["capture-unsafe-operation", "capture-invalidated"]

    def test_an_exception_that_was_only_being_handled_comes_later(self) -> None:
        handled = raised("ModuleNotFoundError: No module named 'flashinfer'", ["/srv/m.py:<module>"])
        died_of = raised(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB", ["/m.py:f"], "context"
        )
        assert ids(handled, died_of) == ["cuda-out-of-memory", "flashinfer-missing", "package-missing"]

    def test_an_exception_named_as_the_cause_comes_first(self) -> None:
        cause = raised("OSError: [Errno 28] No space left on device", ["/srv/m.py:save"])
        effect = raised("ImportError: libx.so.1: cannot open shared object file", ["/srv/m.py:load"], "cause")
        assert ids(cause, effect) == ["disk-full", "shared-library-missing"]

    def test_a_line_refines_what_the_exception_tells(self) -> None:
        _, text, frames = next(example for example in EXAMPLES if example[0] == "triton-launcher-build-failed")
        line = "main.c:5:10: fatal error: Python.h: No such file or directory"
        assert ids(raised(text, frames), lines=[line])[0] == "python-headers-missing"

    def test_windows_paths(self) -> None:
        text = "RuntimeError: Cannot find ptxas.exe"
        assert ids(raised(text, [r"D:\venv\Lib\site-packages\triton\backends\nvidia\compiler.py:hash"])) == [
            "ptxas-missing"
        ]

    def test_nothing_to_go_by(self) -> None:
        assert ids() == []
        assert ids(Raised(type="", message="", frames=())) == []


STRESS = [
    "a" * 300_000,
    "CUDA " * 60_000,
    "\n" * 300_000,
    "NCCL error in: " * 20_000,
    "max seq len (1)" * 20_000,
    "ImportError: " + "x.so: undefined symbol: " * 10_000,
    "subprocess.CalledProcessError: Command '[" + ".c', " * 60_000,
    "No such file or directory: '" * 10_000,
    "Error(s) in loading state_dict for a:\n" * 8_000,
    "\x00\ud800é" * 50_000,
    "gloo/transport/tcp/" * 15_000,
]


@pytest.mark.parametrize("text", STRESS, ids=[repr(text[:20]) for text in STRESS])
def test_long_text_takes_no_long_time(text: str) -> None:
    started = time.perf_counter()
    one = Raised(type="RuntimeError", message=text, frames=(Frame(text[:100_000], 1, text[:100_000]),))
    match_known_issues(Failure(chain=(one, one)), CATALOGUE, [text])
    assert time.perf_counter() - started < 20, "seconds would do; a backtracking pattern takes hours"


def test_a_cause_at_the_end_of_a_very_long_message_is_found() -> None:
    text = "RuntimeError: Error building extension 'k': " + "[1/900] nvcc -c k.cu\n" * 50_000
    assert ids(raised(f"{text}nvcc fatal   : Unsupported gpu architecture 'compute_90a'", [])) == [
        "nvcc-unknown-architecture"
    ]


def entry(**fields: str) -> str:
    given = {
        "id": "'a'",
        "title": "'t'",
        "exception": "'boom'",
        "frame": "'f'",
        "meaning": "'m'",
        "fix": "'f'",
        "source": "'s'",
    }
    return "[[issue]]\n" + "".join(f"{key} = {value}\n" for key, value in {**given, **fields}.items() if value)


WRONG = {
    "not TOML": ("[[issue", "TOML"),
    "something beside issues": ("[other]\nx = 1", "'other'"),
    "issues that are no list": ("issue = 3", "'issue'"),
    "an issue that is no table": ("issue = [3]", "no table"),
    "no id": (entry(id=""), "no field 'id'"),
    "no fix": (entry(fix=""), "no field 'fix'"),
    "an unknown field": (entry(severity="'high'"), "unknown field 'severity'"),
    "a misspelt field": (entry(exeption="'high'"), "did you mean 'exception'?"),
    "a number for a text": (entry(title="3"), "'title'"),
    "an empty text": (entry(meaning="' '"), "'meaning'"),
    "an id of two words": (entry(id="'Some Id'"), "kebab-case"),
    "no clause": (entry(exception="", frame=""), "neither"),
    "a frame alone": (entry(exception="", log_line="'boom'"), "without 'exception'"),
    "no frame and no reason": (entry(frame=""), "'frame_free'"),
    "a frame and a reason for none": (entry(frame_free="'why'"), "'frame_free'"),
    "a bad pattern": (entry(exception="'('"), "no regular expression"),
    "a pattern for everything": (entry(frame="'x?'"), "matches everything"),
    "an unbounded repeat": (entry(exception="'a.*b'"), "upper bound"),
    "a nested repeat": (entry(exception="'(a+)+b'"), "upper bound"),
    "repeats inside of repeats": (entry(exception="'(a{1,99}){1,99}b'"), "hours"),
    "repeats in a row": (entry(log_line="'never ending.{0,900}x{0,900}y{0,900}z'"), "hours"),
    "an open range": (entry(log_line="'a{2,}b'"), "upper bound"),
    "a flag": (entry(exception="'(?i)boom'"), "flags"),
    "a line without plain words": (entry(log_line=r"'boom \d{1,3}|\w{2,3}'"), "no plain words"),
    "refines that is no list": (entry(refines="'b'"), "'refines'"),
    "examples that are no list": (entry(examples="'boom'"), "'examples'"),
    "an empty example": (entry(counter_examples="['']"), "'counter_examples'"),
    "echo that is no truth": (entry(echo="'yes'"), "'echo'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_refused_with_its_place(name: str) -> None:
    text, why = WRONG[name]
    with pytest.raises(ConfigError, match="PG120 .* at team.toml") as caught:
        parse_catalogue(text, "team.toml")
    assert why in caught.value.why or why in caught.value.hint


def test_escaped_and_bracketed_signs_are_no_repeats() -> None:
    (issue,) = parse_catalogue(entry(exception=r"'C\+\+ [*+]{1,3}\{2,\}'"), "team.toml")
    assert issue.exception is not None
    assert issue.exception.search("C++ *+{2,}")


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"(?:stopped|halted) by the watchdog", "job halted by the watchdog"),
        (r"nodes? went ((very )?far )?away$", "node went away"),
        (r"[Ss]tore is full\b|\(disk\) is broken!{0,2}", "the (disk) is broken"),
        (r"a{3}bcdefgh\.{2}x", "aaabcdefgh..x"),
    ],
)
def test_looking_for_plain_words_first_loses_no_line(pattern: str, line: str) -> None:
    (issue,) = parse_catalogue(entry(exception="", frame="", log_line=f"'{pattern}'"), "team.toml")
    assert log_line_matcher([issue])(line) == (issue,)
    assert log_line_matcher([issue])("another line") == ()


def test_few_words_are_watched_for() -> None:
    words = watched_words(CATALOGUE)
    assert len(words) < 50
    assert all(any(word in line for word in words) for _, line in LINES)
    ordinary = (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied\nINFO 05-02 03:58:46 [a.py:3] Decode batch, 3 running"
    )
    assert not any(word in ordinary for word in words), "a word of every traceback makes reading slow"


class TestExtra:
    def load(self, tmp_path: Path, text: str) -> tuple[KnownIssue, ...]:
        path = tmp_path / "team.toml"
        path.write_text(text)
        return load_catalogue([path])

    def test_a_team_adds_its_own(self, tmp_path: Path) -> None:
        added = self.load(
            tmp_path, entry(id="'ours'", exception="'CUDA out of memory'", refines="['cuda-out-of-memory']")
        )
        assert len(added) == len(CATALOGUE) + 1
        failure = Failure(
            chain=(raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 B", ["/f.py:f"]),)
        )
        assert [issue.id for issue in match_known_issues(failure, added)] == ["ours", "cuda-out-of-memory"]

    def test_an_id_is_taken(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"team.toml, line 1: the id 'port-in-use' is taken, by known_issues"):
            self.load(tmp_path, entry(id="'port-in-use'"))

    def test_refines_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="'nothing', which does not exist"):
            self.load(tmp_path, entry(refines="['nothing']"))

    def test_refines_itself(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="a -> b -> a"):
            self.load(tmp_path, entry(refines="['b']") + entry(id="'b'", refines="['a']"))

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="team.toml"):
            load_catalogue([tmp_path / "team.toml"])

    def test_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "team.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="team.toml"):
            load_catalogue([tmp_path / "team.toml"])


def test_describe_and_rule() -> None:
    text = describe(next(issue for issue in CATALOGUE if issue.id == "thunder-cuda-stream"))
    assert text.splitlines()[0] == "thunder-cuda-stream: lightning-thunder hands a CUDA stream to Inductor"
    assert "and a frame matches /(^|/)thunder/dynamo/" in text
    assert "  fixed in lightning-thunder main, 2025-12-01" in text
    oom = next(issue for issue in CATALOGUE if issue.id == "nvcc-gcc-too-new")
    assert oom.rule.count("; or a line matches /") == 1
    assert "any frame (only nvcc's header prints this)" in oom.rule
    assert "fixed in" not in describe(oom)


def test_the_part_of_a_rule_that_holds_is_told() -> None:
    by_line = find_matches(Failure(chain=()), CATALOGUE, ["Killed"])
    raised_one = find_matches(Failure(chain=(raised("SIGKILL: sent by nobody", []),)), CATALOGUE)
    assert [match.rule.partition(" matches")[0] for match in (*by_line, *raised_one)] == ["a line", "an exception"]


def test_the_example_of_the_docs_works() -> None:
    page = (DOCS / "known-issues.md").read_text()
    (example,) = [block.partition("```")[0] for block in page.split("```toml\n")[1:]]
    (issue,) = parse_catalogue(example, "known-issues.md")
    failure = Failure(chain=(raised("ValueError: page table of 4096 entries is full", ["/srv/acme/kv/pages.py:grow"]),))
    assert match_known_issues(failure, [issue]) == (issue,)
