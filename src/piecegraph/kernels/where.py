"""Which calls and kernels a user means: by op, module, line or kernel."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from piecegraph.origin import LaunchCall, Origin
from piecegraph.plan import SourceLine


@dataclass(frozen=True, slots=True)
class Where:
    """What is asked for; what is left out matches everything.

    Args:
        op: ``aten::mm``, ``aten.mm`` or ``mm``; ``*`` stands for anything.
        module: a path or its end, with ``*`` for anything: ``layers.*.mlp`` is every such module and all inside it.
        line: ``model.py:12`` or ``model.py``, anywhere on the stack.
        kernel: a kernel's name or a part of it; with ``*`` the whole name must match.
    """

    op: str | None = None
    module: str | None = None
    line: str | None = None
    kernel: str | None = None

    def matches(self, call: LaunchCall | None, kernel: str) -> bool:
        """Whether a kernel that a call launched is meant. Of a fused kernel, one origin is enough."""
        if self.kernel is not None and not _matches_kernel(self.kernel, kernel):
            return False
        if self.op is None and self.module is None and self.line is None:
            return True
        return call is not None and any(self._matches_origin(origin, call.op) for origin in _origins(call))

    def origins(self, call: LaunchCall | None) -> list[Origin]:
        """Those of a call's origins that are meant."""
        return [] if call is None else [origin for origin in call.origins if self._matches_origin(origin, call.op)]

    def _matches_origin(self, origin: Origin, called: str) -> bool:
        return (
            (self.op is None or matches_op(self.op, origin.op) or matches_op(self.op, called))
            and (self.module is None or matches_module(self.module, origin.module))
            and (self.line is None or any(matches_line(self.line, frame) for frame in origin.stack))
        )


def _origins(call: LaunchCall) -> tuple[Origin, ...]:
    return call.origins or (Origin(call.op, ""),)


def _matches_kernel(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) if "*" in pattern else pattern in name


def matches_op(pattern: str, op: str) -> bool:
    """Whether an op is meant.

    >>> matches_op("aten.mm", "aten::mm"), matches_op("mm", "aten::mm"), matches_op("mm", "aten::addmm")
    (True, True, False)
    """
    wanted = pattern.replace("::", ".")
    known = op.replace("::", ".")
    return fnmatchcase(known, wanted) or fnmatchcase(known, f"*.{wanted}")


def matches_module(pattern: str, path: str) -> bool:
    """Whether a module is meant, or one inside of one that is.

    >>> matches_module("layers.*.mlp", "model.layers.3.mlp.up_proj"), matches_module("mlp", "model.mlp_norm")
    (True, False)
    """
    padded = f".{path}."
    return fnmatchcase(padded, f"*.{pattern}.*")


def matches_line(pattern: str, line: SourceLine) -> bool:
    """Whether a line is meant.

    >>> matches_line("model.py:7", SourceLine("/home/me/model.py", 7)), matches_line("l.py", SourceLine("model.py", 7))
    (True, False)
    """
    file, _, number = pattern.rpartition(":") if pattern.rpartition(":")[2].isdigit() else (pattern, "", "")
    return f"/{line.file}".endswith(f"/{file.lstrip('/')}") and number in ("", str(line.line))
