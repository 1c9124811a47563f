"""What a start imports, and what it leaves for those who need it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import piecegraph
piecegraph.compile, piecegraph.LLM
assert "piecegraph.explain.page" not in sys.modules, "a page of failures"

from piecegraph.base import torch_compat
torch_compat.import_inductor()
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.kernel.mm import mm_template
import jinja2
assert type(KernelTemplate._template_from_string("{{ 6 * 7 }}")) is jinja2.Template, "later ones as ever"
late = mm_template.template
assert type(late) is not jinja2.Template, "not compiled yet"
assert late.render.__func__ is jinja2.Template.render
assert late.name is None
assert late.root_render_func is late.root_render_func, "compiled once"
import copy
assert copy.copy(late).root_render_func is late.root_render_func
print("done")
"""


def test_pages_and_templates_wait_until_somebody_needs_them() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "done\n", run.stderr
