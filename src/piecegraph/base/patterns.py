"""How users say which kernels they mean: a glob for a name, a module with all that is in it, a file or a line of it."""

from __future__ import annotations

from fnmatch import fnmatchcase

from piecegraph.base.plan import SourceLine
from piecegraph.errors import SelectionError


def name_matches(name: str, glob: str) -> bool:
    """Whether a name is meant by a glob of ``*`` and ``?``.

    Square brackets stand for themselves: short names of kernels hold them.

    >>> name_matches("elementwise_kernel[MulFunctor]", "elementwise*[Mul*]")
    True
    """
    return fnmatchcase(name, glob.replace("[", "[[]"))


def op_matches(op: str, glob: str) -> bool:
    """Whether an op is meant, however torch writes it.

    >>> op_matches("aten::mm", "aten.mm"), op_matches("aten::addmm", "aten::*mm"), op_matches("aten::bmm", "aten::mm")
    (True, True, False)
    """
    return name_matches(op, glob) or name_matches(op.replace("::", "."), glob)


def module_matches(path: str, glob: str) -> bool:
    """Whether a module is meant, or one that it is part of. The glob may begin at any part of the path.

    >>> module_matches("model.layers.3.mlp.up_proj", "layers.*.mlp")
    True
    >>> module_matches("model.layers.11.mlp", "layers.1"), module_matches("", "*"), module_matches("", "")
    (False, False, True)
    """
    if not path or not glob:
        return path == glob
    parts = path.split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return any(name_matches(tail, glob) or name_matches(tail, f"{glob}.*") for tail in tails)


def line_matches(line: SourceLine, wanted: tuple[str, int | None]) -> bool:
    """Whether a line is the one that is meant, or in the file that is meant."""
    file, number = wanted
    return number in (None, line.line) and f"/{line.file}".endswith(f"/{file.lstrip('/')}")


def parse_line(text: str) -> tuple[str, int | None]:
    """``file.py`` or ``file.py:12``; the file may have folders in front.

    >>> parse_line("models/llama.py:12"), parse_line("llama.py")
    (('models/llama.py', 12), ('llama.py', None))
    """
    file, colon, number = text.rpartition(":")
    if not colon and text:
        return text, None
    if not file or not number.isdecimal():
        raise SelectionError(
            "PG713",
            f"{text!r} is no line",
            why="a line is written as file.py or file.py:12",
            hint="take one from the table's column of Python lines",
        )
    return file, int(number)
