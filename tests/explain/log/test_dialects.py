"""Tracebacks in another dress: each is printed by really failing, and read as the failure that it is."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from piecegraph.explain.evidence import Failure, Process
from tests.explain.log.test_lines import TRACEBACK, WHOLE, prefixed, scan, shape

PROGRAM = """\
import json

def parse(text):
    return json.loads(text)

def configure(text):
    try:
        return parse(text)
    except ValueError as error:
        raise RuntimeError("no configuration") from error
"""
MESSAGE = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"


def run_python(folder: Path, script: str, *, width: int = 100) -> str:
    """What a script prints, standard error included."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "script.py").write_text(textwrap.dedent(script))
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": str(width), "HOME": str(folder), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def only_failure(text: str) -> Failure:
    (failure,) = scan(text).failures
    return failure


def places(failure: Failure) -> list[list[tuple[str, int, str]]]:
    return [[(frame.file.rpartition("/")[2], frame.line, frame.function) for frame in r.frames] for r in failure.chain]


# -- Jupyter


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a kernel shows of a cell that fails, with its colours."""
    folder = tmp_path_factory.mktemp("notebook")
    script = f"""
        import nbformat
        from nbclient import NotebookClient
        cells = [{PROGRAM!r}, "configure('{{')", "x = = 2"]
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        NotebookClient(book, timeout=60, kernel_name="python3", allow_errors=True).execute()
        for cell in book.cells[1:]:
            print(*cell.outputs[0]["traceback"], sep="\\n")
            print("=== next cell")
    """
    return run_python(folder, script)


def test_a_notebook(notebook: str) -> None:
    failure = only_failure(notebook.split("=== next cell")[0])
    assert [(raised.type, raised.link) for raised in failure.chain] == [
        ("JSONDecodeError", ""),
        ("RuntimeError", "cause"),
    ]
    assert failure.chain[0].message == MESSAGE
    first, second = places(failure)
    assert first[1] == ("Cell In[1]", 4, "parse")
    assert first[-1][0] == "decoder.py"
    assert second == [("Cell In[2]", 1, "<module>"), ("Cell In[1]", 10, "configure")]
    assert failure.chain[1].frames[-1].source == 'raise RuntimeError("no configuration") from error'


def test_a_notebook_that_cannot_be_parsed(notebook: str) -> None:
    failure = only_failure(notebook.split("=== next cell")[1])
    assert (failure.chain[0].type, failure.chain[0].message) == ("SyntaxError", "invalid syntax")
    assert places(failure) == [[("Cell In[3]", 1, "")]]


def test_colours_whose_escape_was_lost(notebook: str) -> None:
    assert only_failure(notebook.split("=== next cell")[0].replace("\x1b", "")).chain[0].message == MESSAGE


@pytest.mark.parametrize("head", ["<ipython-input-3-ab12> in <module>", "/srv/app/train.py in step(batch, *args)",
                                  "[/srv/app/train.py](https://localhost:8080/#) in step(batch)",
                                  "Input In [3], in <cell line: 30>()"])  # fmt: skip
def test_notebooks_of_earlier_years(head: str) -> None:
    text = "\n".join(
        [
            "-" * 75,
            "ValueError                                Traceback (most recent call last)",
            head,
            "     29 def step(batch):",
            '---> 30     raise ValueError("loss is nan")',
            "     31 ",
            "",
            "ValueError: loss is nan",
        ]
    )
    failure = only_failure(text)
    assert shape(failure)[:2] == ("ValueError", "loss is nan")
    ((place,),) = places(failure)
    assert place[1] == 30


def test_words_about_a_traceback_are_none() -> None:
    text = "the log of step 3 has no Traceback (most recent call last)\n   5 of 7 done\n---> 7 is next\nvalue: 3"
    assert scan(text).failures == ()


# -- rich


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_box_of_rich(width: int, tmp_path: Path) -> None:
    script = """
        from rich.traceback import install
        install(show_locals=True)
        from program import configure
        configure("{")
    """
    failure = only_failure(run_python(tmp_path, script, width=width))
    assert [(raised.type, raised.link) for raised in failure.chain] == [
        ("JSONDecodeError", ""),
        ("RuntimeError", "cause"),
    ]
    first, second = places(failure)
    assert [place[:2] for place in first[:2]] == [("program.py", 8), ("program.py", 4)]
    assert second == [("script.py", 5, "<module>"), ("program.py", 10, "configure")]
    assert failure.chain[1].frames[-1].source.startswith('raise RuntimeError("no configuration')


def test_a_box_that_holds_no_traceback(tmp_path: Path) -> None:
    script = """
        from rich.panel import Panel
        from rich import print
        print(Panel("/srv/app/train.py:12 in main", title="last place"))
    """
    assert scan(run_python(tmp_path, script)).failures == ()


def test_the_log_handler_of_rich_indents_and_wraps(tmp_path: Path) -> None:
    script = """
        import logging
        from rich.logging import RichHandler
        logging.basicConfig(handlers=[RichHandler()])
        from program import parse
        try:
            parse("{")
        except ValueError:
            logging.exception("it failed")
    """
    failure = only_failure(run_python(tmp_path, script, width=80))
    assert failure.chain[0].type == "json.decoder.JSONDecodeError"
    assert failure.chain[0].message == MESSAGE
    assert [place[:2] for place in places(failure)[0][:2]] == [("script.py", 7), ("program.py", 4)]


# -- damage


def test_a_traceback_that_is_indented_as_a_whole() -> None:
    text = (
        "  error: subprocess-exited-with-error\n" + textwrap.indent(TRACEBACK, " " * 6) + "\n      [end of output]\nbye"
    )
    failure = only_failure(text)
    assert shape(failure)[0] == "ValueError"
    assert shape(failure)[2] == WHOLE[2]


def test_indentation_that_was_lost() -> None:
    text = "\n".join(line.strip() for line in TRACEBACK.split("\n"))
    assert shape(only_failure(text + "\nand so it ends"))[2] == WHOLE[2]


def test_without_indentation_a_source_that_reads_like_an_exception_is_still_one() -> None:
    text = TRACEBACK.replace("step(batch)", "LossError: float").replace("    ^^^^^^^^^^^\n", "")
    failure = only_failure("\n".join(line.strip() for line in text.split("\n")))
    assert shape(failure)[2][0] == (12, "main", "LossError: float")
    assert shape(failure)[:2] == ("ValueError", "loss is nan")


@pytest.mark.parametrize("quotes", [("", ""), ("\u201c", "\u201d"), ("'", "'"), ('\\"', '\\"')])
def test_quotes_that_were_lost_or_changed(quotes: tuple[str, str]) -> None:
    text = TRACEBACK.replace('File "', f"File {quotes[0]}").replace('", line', f"{quotes[1]}, line")
    assert [frame[:2] for frame in shape(only_failure(text))[2]] == [(12, "main"), (30, "step")]


LONG = TRACEBACK.replace("/srv/app", "/home/someone/miniconda3/envs/training/lib/python3.11/site-packages/app")


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=9) ERROR 05-08 19:06:38 [core.py:962] "])
@pytest.mark.parametrize("width", [54, 80])
def test_lines_that_a_terminal_folded(width: int, prefix: str) -> None:
    text = prefixed(prefix, LONG)
    folded = [line[at : at + width] for line in text.split("\n") for at in range(0, len(line), width)]
    failure = only_failure("\n".join(folded))
    assert [frame[:2] for frame in shape(failure)[2]] == [(12, "main"), (30, "step")]
    assert failure.chain[0].frames[0].file.endswith("site-packages/app/train.py")
    assert shape(failure)[1] == "loss is nan"


def test_lines_that_only_happen_to_be_as_long_as_each_other() -> None:
    text = TRACEBACK + "\n" + "x" * 80 + "\n" + "y" * 80
    assert shape(only_failure(text))[2] == WHOLE[2]


SCRIPT = """\
Traceback (most recent call last):
  File "/srv/infer.py", line 12, in <module>
    model(x)
RuntimeError: The following operation failed in the TorchScript interpreter.
{serialized}Traceback of TorchScript{original} (most recent call last):
  File "/srv/model.py", line 30, in forward
    def forward(self, x):
        return self.a(x) + self.b(x)
               ~~~~~~~~~~~~~~~~~~~~ <--- HERE
RuntimeError: The size of tensor a (3) must match the size of tensor b (4)
"""
SERIALIZED = """\
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__/model.py", line 10, in forward
    _0 = (self).a
    return torch.add(_0, _1)
           ~~~~~~~~~ <--- HERE

"""


@pytest.mark.parametrize(("serialized", "original"), [("", ""), (SERIALIZED, ", original code")])
def test_what_torchscript_quotes_is_what_was_raised_first(serialized: str, original: str) -> None:
    (failure,) = scan(SCRIPT.format(serialized=serialized, original=original)).failures
    first, shown = failure.chain
    assert first.message == "The size of tensor a (3) must match the size of tensor b (4)"
    assert [(frame.file, frame.line, frame.source) for frame in first.frames] == [
        ("/srv/model.py", 30, "return self.a(x) + self.b(x)")
    ]
    assert shown.message.startswith("The following operation failed")


def test_a_traceback_in_one_line_of_json() -> None:
    text = json.dumps({"level": "error", "stack": TRACEBACK})
    assert [frame[:2] for frame in shape(only_failure(text))[2]] == [(12, "main"), (30, "step")]


# -- prefixes that nobody listed


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[2025-10-21 19:07:30,{n:03}] [INFO] [rank3]: ", 3),
        ("19:07:30.{n:03} | worker-7 | stderr: ", None),
        ("> ", None),
        ("<12> train[{n}]: ", None),
        ("Oct 21 19:07:30 node7 vllm[8707]: ", None),
        ("[2025-10-21 19:07:30][node7][{n}] E ", None),
    ],
)
def test_a_prefix_is_learned_from_the_traceback_itself(prefix: str, rank: int | None) -> None:
    lines = [prefix.format(n=n) + line for n, line in enumerate(("before", *TRACEBACK.split("\n"), "after"))]
    failure = only_failure("\n".join(lines))
    assert shape(failure)[2] == WHOLE[2]
    assert failure.chain[0].type == "ValueError"
    assert failure.processes == ((Process(f"rank{rank}", rank=rank),) if rank is not None else ())


def test_words_in_front_of_a_traceback_are_no_prefix() -> None:
    failure = only_failure("Uncaught: " + TRACEBACK + "\nUncaught: no more")
    assert shape(failure)[2] == WHOLE[2]


# -- tracebacks whose head was lost, and loguru's


def test_a_box_without_its_head(tmp_path: Path) -> None:
    script = "from rich.traceback import install\ninstall()\nfrom program import parse\nparse('{')\n"
    text = run_python(tmp_path, script)
    at = text.index("❱")
    failure = only_failure(text[text.rindex("\n", 0, at) :])
    assert failure.chain[0].type == "JSONDecodeError"
    assert places(failure)[0][0][:2] == ("program.py", 4)


def test_a_notebook_without_its_head(notebook: str) -> None:
    text = notebook[notebook.index("\x1b[36mFile ") :].split("The above exception")[0]
    failure = only_failure(text)
    assert (failure.chain[0].type, failure.chain[0].message) == ("JSONDecodeError", MESSAGE)
    assert places(failure)[0][-1][0] == "decoder.py"


def test_a_path_that_is_only_named() -> None:
    assert (
        scan("File /srv/app/train.py:12 is new\nFile /srv/app/train.py\nValueError: is what it may raise").failures
        == ()
    )


def test_loguru() -> None:
    text = """\
        2024-05-01 10:00:01.000 | ERROR    | __main__:main:10 - failed
        Traceback (most recent call last):

          File "/srv/app/train.py", line 12, in main
            step(batch)
            │    └ 3
            └ <function step at 0x7f>

        > File "/srv/app/train.py", line 30, in step
            raise ValueError("loss is nan")

        ValueError: loss is nan

        bye"""
    failure = only_failure(textwrap.dedent(text))
    assert shape(failure)[2] == WHOLE[2]
