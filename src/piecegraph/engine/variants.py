"""What is made anew while ops are intercepted, and put back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from piecegraph.graph.interception import Interception, is_off, registry

Made = TypeVar("Made")


class Variants(Generic[Made]):
    """One plan without callbacks, and while ops in it are intercepted, another one that is cut at them.

    The first is kept all the while, with its tapes, so that afterwards everything is as it was.

    Args:
        num_places: how many calls an interception is for.
        make: makes the plan for the interceptions that have places.
    """

    def __init__(self, num_places: Callable[[Interception], int], make: Callable[..., Made]) -> None:
        self.num_places = num_places
        self._make = make
        self._made: dict[tuple[Interception, ...], Made] = {}
        self._live: tuple[Interception, ...] = ()
        self._concerning: tuple[Interception, ...] = ()
        """Those of the live ones that have places here."""
        self._last: Made | None = None

    def current(self, *arguments: Any) -> Made:
        """What serves now; made if need be, from the interceptions and the arguments."""
        if registry.live is self._live and self._last is not None:
            return self._last
        self._follow()
        if self._concerning not in self._made:
            self._made[self._concerning] = self._make(self._concerning, *arguments)
        self._last = self._made[self._concerning]
        return self._last

    @property
    def shown(self) -> Made:
        """What serves next, or what served last if that is not made yet."""
        self._follow()
        shown = self._made.get(self._concerning, next(reversed(self._made.values()), None))
        assert shown is not None, "it is kept once something is made"
        return shown

    @property
    def all(self) -> list[Made]:
        """Everything that is kept."""
        return list(self._made.values())

    def _follow(self) -> None:
        """Notice that interceptions came or went. Where none may run, there are none."""
        live = () if is_off() else registry.live
        if live is not self._live:
            self._live, self._last = live, None
            self._concerning = tuple(each for each in live if self.num_places(each))
            self._made = {key: self._made[key] for key in {(): None, self._concerning: None} if key in self._made}
