"""Found by Python in the place of the user's own ``sitecustomize``, which it runs after the recorder has started."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as type checkers know it, without importing typing
if TYPE_CHECKING:
    from typing import Any


def start() -> None:
    """Record this process, once: of a run inside of a run, the inner one does."""
    if hasattr(sys, "_piecegraph_records"):
        return
    sys._piecegraph_records = True  # type: ignore[attr-defined]
    try:
        from _piecegraph_recorder.listen import install  # type: ignore[import-not-found]

        install(os.environ)
    except Exception:  # noqa: BLE001 - the program must not notice
        pass


def run_users_own(own: Any) -> None:
    """Run the sitecustomize that Python would have found without ours, which is off the path by now."""
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


if __name__ == "sitecustomize":
    own_folder = os.path.dirname(os.path.abspath(__file__))
    start()
    sys.path[:] = [part for part in sys.path if os.path.abspath(part) != own_folder]
    run_users_own(sys.modules["sitecustomize"])
