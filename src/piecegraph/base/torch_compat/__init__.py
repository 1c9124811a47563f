"""Every use of a torch name that torch does not promise to keep.

One function for each need, with the versions it was checked on. All of it holds for torch 2.11 and 2.13 unless a
function says otherwise; a torch upgrade is then a diff of this folder. Nothing here knows what a piece or a tape is.

A file holds one subject; all of them are used by way of this name: ``torch_compat.size_hint(...)``.
"""

from piecegraph.base.torch_compat.compilers import *
from piecegraph.base.torch_compat.cuda import *
from piecegraph.base.torch_compat.distributed import *
from piecegraph.base.torch_compat.fakes import *
from piecegraph.base.torch_compat.fx_graphs import *
from piecegraph.base.torch_compat.guards import *
from piecegraph.base.torch_compat.inductor import *
from piecegraph.base.torch_compat.kernels import *
from piecegraph.base.torch_compat.memory import *
from piecegraph.base.torch_compat.modes import *
from piecegraph.base.torch_compat.modules import *
from piecegraph.base.torch_compat.ops import *
from piecegraph.base.torch_compat.sizes import *
from piecegraph.base.torch_compat.tolerance import *
from piecegraph.base.torch_compat.tracing import *
