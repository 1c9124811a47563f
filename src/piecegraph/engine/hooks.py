"""Notices that submodules have other hooks than when plans were made: a trace has them in its graph.

Every hook that torch registers gets the next number, so one comparison at a call tells that none came. That one went
shows in the dictionary it was in, and few modules have any. Those of the module itself run around its plans.
"""

from __future__ import annotations

import torch

from piecegraph.base import torch_compat
from piecegraph.base.dict_versions import DictVersions

_Hooks = tuple[tuple[int, tuple[int, ...]], ...]


class HookWatch:
    """Whether hooks of the modules in a module were added or removed."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._root = root
        self.renew()

    def renew(self) -> None:
        """Take them as they are now."""
        self.next_id = torch_compat.hook_numbers.next_id
        """While no hook has got this number, none was added."""
        self._hooks = self._all()
        self.are_any = bool(self._hooks)
        """Whether one may be removed."""
        self._filled = DictVersions([hooks for hooks in self._dicts() if hooks])

    def have_changed(self) -> bool:
        """Whether there are others than there were."""
        if torch_compat.hook_numbers.next_id == self.next_id and self._filled.are_known():
            return False
        is_other = self._all() != self._hooks
        if not is_other:  # they were somebody else's
            self.renew()
        return is_other

    def _dicts(self) -> list[dict[int, object]]:
        if self._root is None:
            return []
        modules = [module for module in self._root.modules() if module is not self._root]
        return [getattr(module, name) for module in modules for name in torch_compat.HOOKS_OF_A_FORWARD]

    def _all(self) -> _Hooks:
        """The numbers of all hooks, by the dictionary they are in."""
        return tuple((number, tuple(hooks)) for number, hooks in enumerate(self._dicts()) if hooks)
