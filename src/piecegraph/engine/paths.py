"""How calls of one size are served when what Python reads of data decides what runs. See Note [Paths]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.config import Options
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Cut, SizeKey
from piecegraph.base.progress import Progress
from piecegraph.engine.breakable import BreakableBody
from piecegraph.engine.route import Refusal, TapeRoute, why_elsewhere
from piecegraph.engine.sharing import Sharing
from piecegraph.errors import PiecegraphError
from piecegraph.graph.signature import Call, Signature
from piecegraph.provenance.ledger import ledgers
from piecegraph.tape.buffers import StaticInputs
from piecegraph.tape.calls import SizedCalls
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.library import TapeLibrary, TapeWatch
from piecegraph.tape.reads import PathLeft
from piecegraph.tape.tape import Addresses, Tape


@dataclass(frozen=True, slots=True)
class Undo:
    """Puts back what a replay has changed by the time it leaves its tape."""

    state: tuple[torch.Tensor, ...]
    copies: tuple[torch.Tensor, ...]
    generators: tuple[torch.Generator, ...]

    @classmethod
    def of(cls, state: Sequence[torch.Tensor], generators: Sequence[torch.Generator]) -> Undo:
        with torch_compat.outside_inference():
            return cls(tuple(state), tuple(torch.empty_like(tensor) for tensor in state), tuple(generators))

    def save(self) -> list[torch.Tensor]:
        """Keep everything as it is now; returns the states of the generators."""
        if self.state:
            torch_compat.copy_all(self.copies, self.state)
        return [generator.get_state() for generator in self.generators]

    def put_back(self, generator_states: Sequence[torch.Tensor]) -> None:
        if self.state:
            torch_compat.copy_all(self.state, self.copies)
        for generator, state in zip(self.generators, generator_states, strict=True):
            generator.set_state(state)


class Path:
    """One way through the function, recorded."""

    def __init__(
        self,
        body: BreakableBody,
        library: TapeLibrary[SizeKey],
        route: TapeRoute,
        undo: Undo,
        sharing: Sharing | None,
    ) -> None:
        self.sharing = sharing
        """Looks for shared memory that this path writes to."""
        self.answers = body.reads.answers
        """What Python reads on it."""
        self.library = library
        self.num_replays = 0
        self._body = body
        self._route = route
        self._undo = undo
        self._has_undo = bool(undo.state or undo.generators)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return self._body.cuts

    def serve(self, call: Call) -> Any:
        """Raises :class:`PathLeft`, with everything as it was, if a read gives something else."""
        saved = self._undo.save() if self._has_undo else []
        try:
            result = self._route.serve(call)
        except PathLeft:
            self._undo.put_back(saved)
            raise
        self.num_replays += 1
        return result


@dataclass(frozen=True, slots=True)
class PathRecorder:
    """Records paths at one size. It holds no plan, so that a plan that nobody holds is given back at once."""

    body: BreakableBody
    size: SizeKey
    signature: Signature
    example: Call
    buffers: StaticInputs
    device: GraphDevice
    addresses: Addresses | None
    options: Options
    events: EventLog

    def record(self, call: Call) -> Path | str:
        """Record the way that a call goes, or say why it cannot be."""
        key, tensors = self.size, call.tensors
        body = self.body.along(tensors, key.values)
        sharing = Sharing(self.signature, body) if body.written_calls or body.written_state else None
        if sharing is not None and (reason := sharing.found_in(tensors)):
            return reason
        calls = SizedCalls(self.signature, body, self.example, self.options, self.events, self.buffers)
        library = library_of(calls, self.device, self.options, self.events)
        library.record([key], call)
        if key in library.dropped:
            return "recording it ran out of memory"
        if body.reads.answers != body.expected:
            return "what the host reads is something else when the same call runs again"
        tape = library.tapes[key]
        if isinstance(tape, Tape) and (reason := why_elsewhere(body, tape)):
            return reason
        route = TapeRoute(
            body,
            tape,
            key,
            key.values,
            self.buffers,
            clone=self.options.clone_outputs,
            device=self.device,
            addresses=self.addresses,
            loss=None,
        )
        storages = {torch_compat.storage_id(tensor) for tensor in calls.state}
        used = [tensor for tensor in body.reads.used if torch_compat.storage_id(tensor) in storages]
        return Path(body, library, route, Undo.of(used, body.reads.generators), sharing)


class Paths:
    """A :class:`~piecegraph.engine.route.Route` along the path that the data of each call leads to.

    Args:
        recorder: records the paths of calls.
        max_paths: how many are kept.
    """

    loss: Event | None = None

    def __init__(self, recorder: PathRecorder, max_paths: int) -> None:
        self.size = recorder.size
        self.paths: list[Path] = []
        self.num_left = 0
        """How often a tape was left."""
        self.replays = True
        """Whether the last call was served by a tape."""
        self._recorder = recorder
        self._max_paths = max_paths
        self._sharings: list[Sharing] = []
        """Of those paths that write: which one a call will go is not known before."""
        self._latest: Path | None = None
        self._num_strange = 0
        """Calls in a row that were on no path, and could not be recorded as one."""
        self.given_up: Refusal | None = None

    def serve(self, call: Call) -> Any:
        """The result of a call, or a refusal."""
        if self.given_up is not None:
            return self.given_up
        for sharing in self._sharings:
            if reason := sharing.found_in(call.tensors):
                self.replays = False
                return Refusal(Event("PG206", "call", reason))
        path = self._latest
        while path is not None:
            try:
                result = path.serve(call)
            except PathLeft as left:
                self.num_left += 1
                path = self._path_with((*path.answers[: left.index], left.answer))
            else:
                self._latest, self._num_strange, self.replays = path, 0, True
                return result
        return self._serve_strange(call)

    def _path_with(self, answers: tuple[Any, ...]) -> Path | None:
        """The path on which Python reads this. One answer more is known at each try, so the search ends."""
        return next((path for path in self.paths if path.answers[: len(answers)] == answers), None)

    def _serve_strange(self, call: Call) -> Any:
        """Record the path of the call for this and later ones, if it is not one too many."""
        self.replays = False
        if len(self.paths) >= self._max_paths:
            reason = f"{len(self.paths)} paths are recorded already, and what the host reads leads to another"
            return self._refuse(reason)
        made = self.add(call)
        if isinstance(made, str):
            return self._refuse(made)
        try:
            result = made.serve(call)
        except PathLeft:
            return self._refuse("what the host reads is something else when the same call runs again")
        self._latest, self._num_strange, self.replays = made, 0, True
        return result

    def add(self, call: Call) -> Path | str:
        """Record the path of a call, or say why it cannot be. The first one must be recorded."""
        try:
            made = self._recorder.record(call)
        except PiecegraphError as error:
            if not self.paths:
                raise
            return str(error)
        except Exception as error:  # noqa: BLE001 - the user's code raised it, and will again when it runs by itself
            return f"the function raised {type(error).__name__}"
        if isinstance(made, Path):
            self.paths.append(made)
            self._sharings += [made.sharing] if made.sharing is not None else []
        return made

    def _refuse(self, reason: str) -> Refusal:
        hint = "raise options['max_paths'], or mark what reads with @piecegraph.eager_op"
        self._num_strange += 1
        if self._num_strange > self._max_paths:
            reason = f"given up: {self._num_strange} calls in a row were on none of {len(self.paths)} recorded paths"
            self.given_up = Refusal(Event("PG512", f"size {self.size}", reason, hint))
            self.paths.clear()
            self._latest = None
            return self.given_up
        return Refusal(Event("PG511", f"size {self.size}", reason, hint))


def library_of(
    calls: SizedCalls,
    device: GraphDevice | None,
    options: Options,
    events: EventLog,
    watch: TapeWatch | None = None,
) -> TapeLibrary[SizeKey]:
    """What records calls and keeps their tapes."""
    return TapeLibrary(
        calls,
        device,
        events,
        make_ledger=ledgers(options.provenance),
        progress=Progress(options.progress),
        check_always=options.check_addresses == "always",
        watch=watch,
    )
