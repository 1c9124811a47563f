"""Every error piecegraph raises, and the code of every event it counts.

    PiecegraphError
    ├── ConfigError (also ValueError)     PG1xx  the call to piecegraph is wrong
    ├── TraceError                        PG2xx  the model cannot be written down as one graph
    ├── LowerError                        PG3xx  a graph or a piece cannot be cut or compiled
    ├── RecordError                       PG4xx  a size cannot be recorded
    ├── CallError                         PG5xx  a call cannot be served from the plan
    │   ├── FallbackError                        ... and ``on_fallback="raise"`` was asked for
    │   └── AddressError                         ... because memory a graph reads has moved
    ├── InputError                        PG60x  a file given to a command cannot be used
    │                                     PG70x  the same, of a trace
    ├── CommandError                      PG61x  a command cannot do what it was asked to
    │   └── MissingPackageError (also ImportError)   ... or a part of piecegraph: packages of an extra are missing
    ├── RequestError (also ValueError)    PG65x  one request cannot be served; the others go on, also PG660
    ├── ModelError                        PG66x  a language model cannot be loaded or run as it is
    │                                     PG671  the same, of the demo model
    ├── CacheError                        PG67x  the cache on disk cannot be used
    ├── RankError                         PG68x  ranks cannot go on together; PG681 and PG682 are of the kinds above
    ├── SelectionError (also ValueError)  PG71x  what was asked for is not among the kernels that ran
    └── KernelError                       PG73x  kernels of recorded graphs cannot be chosen, read or switched

    PG72x are about interceptions: ConfigError, LowerError or CallError, as the case may be.

The text of an error always says, in this order: what happened, where, why, what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

CODES: dict[str, str] = {
    "PG101": "unknown option or value",
    "PG102": "capture sizes are not positive integers",
    "PG103": "dynamic dimensions do not fit the inputs",
    "PG104": "no such operator",
    "PG105": "not something that can be compiled",
    "PG106": "called after close()",
    "PG107": "an eager op was traced",
    "PG108": "a sampling parameter is out of range",
    "PG109": "a sampling parameter has no effect",
    "PG120": "a catalogue of known issues cannot be used",
    "PG201": "the model cannot be traced as one graph",
    "PG202": "forward changes Python state",
    "PG203": "an argument is of a type the plan cannot watch",
    "PG204": "a result is of a type the plan cannot rebuild",
    "PG205": "a dimension asked to be dynamic is fixed by the model",
    "PG206": "overlapping inputs, one of them written to",
    "PG207": "the shape, strides or memory of a tensor are changed in place",
    "PG208": "the trace computes something else than the function",
    "PG301": "a full graph was asked for, but the model must be cut",
    "PG302": "a piece could not be compiled and runs as it was traced",
    "PG303": "a piece writes to one of two overlapping inputs and runs as it was traced",
    "PG321": "a dump could not be written",
    "PG401": "a piece cannot be captured and runs eagerly",
    "PG402": "a size was dropped: out of memory",
    "PG403": "a size could not be recorded",
    "PG404": "padding is refused: it would change real rows",
    "PG405": "a result lies on another device when it is captured",
    "PG406": "a size was dropped: the model does not take it with repeated rows",
    "PG501": "gradients are needed",
    "PG502": "the call does not match the plan",
    "PG503": "the size is above the largest recorded one",
    "PG504": "the size was not recorded and may not be padded",
    "PG505": "the model takes another branch at this size",
    "PG506": "autocast is on",
    "PG507": "an input is empty",
    "PG508": "a size of one behaves differently from larger sizes",
    "PG509": "too many different inputs or sizes to record them all",
    "PG510": "the bucket is more than twice the size of the input",
    "PG511": "what the host reads leads along a path that is not recorded",
    "PG512": "what the host reads leads along another path at every call",
    "PG513": "no recorded step covers the step yet",
    "PG514": "what the function does depends on how a tensor lies in memory, and it lies otherwise than planned",
    "PG515": "the module has other weights, submodules, hooks or code",
    "PG516": "a dimension that nothing names turned out to change",
    "PG517": "the function asks something of its arguments that is otherwise than it was planned with",
    "PG518": "a call is made from inside of the same compiled call",
    "PG519": "a token was chosen outside of the recorded step",
    "PG520": "memory that a recorded graph reads has moved",
    "PG521": "an eager op returned something else than when it was recorded",
    "PG522": "a transform or a mode wants to see every op",
    "PG523": "a tensor that was made in inference mode is written to",
    "PG524": "a call could not be planned, and runs eagerly",
    "PG601": "an input cannot be read",
    "PG602": "an input is empty",
    "PG603": "an input is no text",
    "PG604": "a file is no result of a benchmark",
    "PG611": "records cannot be kept",
    "PG612": "the command cannot be started",
    "PG613": "some records are missing",
    "PG614": "an address cannot be listened at",
    "PG615": "packages of an extra are missing, or too old",
    "PG616": "a server does not answer as OpenAI's API does",
    "PG617": "the API processes of a server end by themselves",
    "PG618": "a process that sends requests ended by itself",
    "PG650": "a step, or the text, of the request failed",
    "PG651": "the prompt is empty",
    "PG652": "the prompt is longer than the model may read",
    "PG653": "the prompt holds something that is no token of the model, or no position",
    "PG654": "the request needs more cache than there is",
    "PG655": "the logits of the request are not numbers",
    "PG656": "a request of this id is already there",
    "PG657": "a step of another scheduler cannot be run",
    "PG658": "as many requests wait as may",
    "PG659": "the request is not done in time",
    "PG660": "an answer cannot have the form that is asked for",
    "PG661": "there is no model at that path",
    "PG662": "a model of this kind cannot be run",
    "PG663": "the model cannot be traced",
    "PG664": "the model's answers differ from those of transformers",
    "PG665": "the model, the cache, the buffers or the states do not fit into memory",
    "PG666": "the model has no tokenizer",
    "PG667": "the model has no chat template that works",
    "PG668": "deterministic=True cannot be kept",
    "PG669": "the checkpoint is quantised in a way that is not read",
    "PG671": "the demo model cannot be read",
    "PG672": "the cache folder is not safe to use",
    "PG673": "the cache folder cannot be used",
    "PG674": "an entry of the cache cannot be used and was made again",
    "PG675": "there is no such entry in the cache",
    "PG676": "an archive of cache entries cannot be used",
    "PG681": "this process is no rank of such a job",
    "PG682": "a model cannot be shared out to ranks",
    "PG683": "another rank has failed, or is gone",
    "PG684": "ranks differ where they must agree",
    "PG685": "sums over ranks by one kernel are wrong",
    "PG701": "a trace cannot be read",
    "PG702": "a trace is empty",
    "PG703": "a trace is not JSON",
    "PG704": "a trace holds no events that are of use",
    "PG705": "a trace is cut off",
    "PG706": "a trace is a damaged gzip file",
    "PG711": "no such column to sort by",
    "PG712": "no kernel matches",
    "PG713": "a selection cannot be read",
    "PG714": "a trace cannot be saved like that",
    "PG721": "an interception has no callback, or one that cannot be called",
    "PG722": "a callback of an interception returned something that cannot be used",
    "PG723": "an op cannot be intercepted at this place",
    "PG724": "a full graph is cut while an op in it is intercepted",
    "PG731": "the graphs were recorded without provenance",
    "PG732": "the nodes of a graph cannot be read or switched",
    "PG733": "the inputs of a recorded step are gone",
    "PG734": "there is no trace yet",
    "PG735": "the chosen graphs are gone",
}


PLACE = ("phase", "piece", "size", "op", "line")
"""The fields that say where in the making of a plan an error happened."""

_LONGEST = 600
"""Characters of what happened."""

NOTES = frozenset({"PG321", "PG404", "PG406", "PG510", "PG515", "PG516", "PG674", "PG724"})
"""Events that are shown and counted, but are no fallback: the call is served from its plan all the same."""


class PiecegraphError(Exception):
    """Base of all errors; ``code`` is stable across versions.

    Args:
        code: one of :data:`CODES`.
        what: what happened, with its subject.
        where: the source line, module path or op it happened at.
        why: the reason.
        hint: what to do about it.
        phase: ``trace``, ``compile`` or ``capture``, for what goes wrong before a call can be served.
        piece: the number of the step of the plan.
        size: the size being recorded: ``8x128``.
        op: the op.
        line: the line of the user's code: ``model.py:12``.
    """

    exit_code = 1
    """What a command that ends with this error returns."""

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str = "",
        why: str = "",
        hint: str = "",
        phase: str = "",
        piece: int | None = None,
        size: str = "",
        op: str = "",
        line: str = "",
    ) -> None:
        assert code in CODES, code
        what = _shortened(what)
        self.code, self.what, self.where, self.why, self.hint = code, what, where, why, hint
        self.phase, self.piece, self.size, self.op, self.line = phase, piece, size, op, line
        super().__init__(describe(code, what, where, why, hint))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (a failing rank): keep the keyword fields.
        fields = {name: getattr(self, name) for name in ("where", "why", "hint", *PLACE)}
        return (_rebuild, (type(self), self.code, self.what, fields))


def _shortened(what: str) -> str:
    """What was given may be shown in it, and be as long as a file."""
    return what if len(what) <= _LONGEST else f"{what[: _LONGEST - 100]} [...] {what[-80:]}"


class ConfigError(PiecegraphError, ValueError):
    """The arguments given to piecegraph cannot be right."""

    exit_code = 2


class TraceError(PiecegraphError):
    """The model could not be written down as one graph."""


class LowerError(PiecegraphError):
    """The graph could not be cut as asked, or a piece could not be compiled."""


class RecordError(PiecegraphError):
    """A size could not be recorded."""


class CallError(PiecegraphError):
    """A call cannot be served from the plan."""


class FallbackError(CallError):
    """A call would have fallen back and ``on_fallback="raise"`` forbids it."""


class AddressError(CallError):
    """A recorded graph would have read memory that has moved."""


class InputError(PiecegraphError):
    """A file given to a command cannot be used; the command ends as if it had been called wrongly."""

    exit_code = 2


class CommandError(PiecegraphError):
    """A command was given something it cannot work with, or cannot do its work."""

    exit_code = 2


class MissingPackageError(CommandError, ImportError):
    """A part of piecegraph needs packages that are not installed, or newer ones."""


class RequestError(PiecegraphError, ValueError):
    """One request to a language model cannot be served; the others go on."""


class ModelError(PiecegraphError):
    """A language model cannot be loaded, or not be run as it is."""


class CacheError(PiecegraphError):
    """The cache on disk, or something in it, cannot be used."""


class RankError(PiecegraphError):
    """The ranks of a job cannot go on together."""

    rank: int | None = None
    """Which of them failed, if it was one."""


class SelectionError(PiecegraphError, ValueError):
    """What was asked for is not among the kernels that ran, or is not written as it must be."""

    exit_code = 2


class KernelError(PiecegraphError):
    """Kernels of recorded graphs cannot be chosen, read or switched."""


class PiecegraphWarning(UserWarning):
    """A fallback or another loss, told once for each cause."""


@contextlib.contextmanager
def located(**place: Any) -> Iterator[None]:
    """Tell errors that leave this context what is known here of their place; what they know themselves stays.

    >>> try:
    ...     with located(phase="capture", size="8"):
    ...         raise RecordError("PG403", "size 8 could not be recorded", phase="compile")
    ... except RecordError as error:
    ...     error.phase, error.size
    ('compile', '8')
    """
    assert place.keys() <= set(PLACE), place
    try:
        yield
    except PiecegraphError as error:
        for name, value in place.items():
            if getattr(error, name) in ("", None):
                setattr(error, name, value)
        raise


def describe(code: str, what: str, where: str = "", why: str = "", hint: str = "") -> str:
    """Put the parts of a message into the order every piecegraph message has."""
    text = f"{code} {what}"
    if where:
        text += f" at {where}"
    if why:
        text += f": {why.rstrip('.')}"
    return f"{text}. hint: {hint}" if hint else text


def _rebuild(cls: type[PiecegraphError], code: str, what: str, fields: dict[str, Any]) -> PiecegraphError:
    return cls(code, what, **fields)
