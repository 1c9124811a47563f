"""Which failure came first, and which are only its echoes in processes that lost a peer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from piecegraph.explain.evidence import Evidence, Failure

_ECHO_TYPES = re.compile(
    r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException|BrokenPipeError|ConnectionResetError"
    r"|ConnectionRefusedError|ConnectionAbortedError|EOFError|EngineDeadError|ActorDiedError|RayActorError"
    r"|WorkerCrashedError|BrokenProcessPool|CancelledError|BrokenBarrierError|DistStoreError|DistNetworkError|KeyboardInterrupt|SystemExit"
    r"|ExceptionGroup|IncompleteReadError)$"
)
_ECHO_MESSAGES = re.compile(
    r"(?i:connection (?:was )?(?:closed|reset) by (?:remote )?peer|broken pipe|socket closed|remote process exited"
    r"|failed to recv, got 0 bytes|connection was likely closed|watchdog caught collective operation timeout"
    r"|timed out (?:after \d+ ?m?s )?(?:on|in|while|waiting)|wait timeout after|collective operation timeout"
    r"|monitoredbarrier|heartbeat|peer (?:has )?(?:died|disconnected))"
    r"|ncclRemoteError|ncclSystemError|\[Rank \d+\].*[Tt]imeout|Engine core initialization failed"
    r"|EngineCore encountered an issue|WorkerProc initialization failed"
    r"|(?:[Ss]ee|check) (?:the )?(?:root cause|stack trace) above|EngineCore failed to start"
    r"|Rank \d+ scheduler died|Initialization failed\. Please see the error messages above"
)
_ENDED_BY_OTHERS = re.compile(r"^sent by (?!no recorded process)|was sent to the run$")
"""How a record says that a process was ended by its launcher, or together with the whole run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The failures told apart."""

    root: Failure | None
    echoes: tuple[Failure, ...]
    others: tuple[Failure, ...]
    """Failures that are neither: different ways to fail, or survived ones."""
    survived: tuple[Failure, ...]
    """Those of the others after which the run went on."""
    has_only_echoes: bool


def is_echo(failure: Failure) -> bool:
    """Whether a failure says that something else failed.

    A chain that ends in an echo but begins with something else is none.
    """
    if not failure.chain:
        return False
    first = failure.chain[0]
    if failure.kind in ("killed", "interrupted") and _ENDED_BY_OTHERS.search(first.message):
        return True
    return bool(_ECHO_TYPES.search(first.type) or _ECHO_MESSAGES.search(first.message.partition("\n")[0]))


def judge(evidence: Evidence) -> Verdict:
    """The root is the first failure that is no echo and after which the run made no further progress."""
    serious = [failure for failure in evidence.failures if failure.kind != "ignored"]
    ignored = [failure for failure in evidence.failures if failure.kind == "ignored"]
    echoes = [failure for failure in serious if is_echo(failure)]
    candidates = [failure for failure in serious if not is_echo(failure)]
    if not serious:
        return Verdict(None, (), tuple(ignored), tuple(ignored), False)
    progress = max((milestone.line for milestone in evidence.milestones if milestone.line is not None), default=0)
    late = [failure for failure in candidates if failure.line is None or failure.line > progress]
    survived = [failure for failure in candidates if failure not in late] if late else []
    pool = late or candidates or echoes
    root = pool[0]
    return Verdict(
        root,
        tuple(failure for failure in echoes if failure is not root),
        tuple(failure for failure in (*candidates, *ignored) if failure is not root),
        (*survived, *ignored),
        not candidates,
    )
