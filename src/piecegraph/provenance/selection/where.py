"""Which calls and kernels of a graph a user means: by op, module, line or kernel."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.base.patterns import line_matches, module_matches, name_matches, op_matches, parse_line
from piecegraph.provenance.names import short


@dataclass(frozen=True, slots=True)
class Where:
    """What is asked for; what is left out matches everything. Of a fused kernel, one origin that matches is enough."""

    op: str | None = None
    module: str | None = None
    line: str | None = None
    kernel: str | None = None

    def matches(self, call: LaunchCall | None, kernel: str) -> bool:
        """Whether a kernel that a call launched is meant."""
        if self.kernel is not None and not any(name_matches(name, self.kernel) for name in (kernel, short(kernel))):
            return False
        return (self.op is None and self.module is None and self.line is None) or bool(self.origins(call))

    def origins(self, call: LaunchCall | None) -> list[Origin]:
        """Those of a call's origins that are meant."""
        if call is None:
            return []
        return [origin for origin in call.origins or (Origin(call.op, ""),) if self._matches_origin(origin, call.op)]

    def _matches_origin(self, origin: Origin, called: str) -> bool:
        if self.op is not None and not any(op_matches(op, self.op) for op in (origin.op, called)):
            return False
        if self.module is not None and not module_matches(origin.module, self.module):
            return False
        if self.line is None:
            return True
        wanted = parse_line(self.line)
        return any(line_matches(frame, wanted) for frame in origin.stack)
