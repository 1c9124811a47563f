"""What stands in front of a line of a log: who wrote it, and through which logger.

Two kinds of prefix are told apart. A *line prefix* (``[rank3]:``, ``(Worker_TP0 pid=7)``) is put in front of every
line of a process, so it proves who wrote the line. A *record prefix* (``ERROR 05-08 19:06:38 [core.py:962]``) is put
in front of a log record, of which a traceback may be the unprefixed rest; it separates log lines from tracebacks but
proves nothing about the lines below it.

Note [Learned prefixes]: no list of prefixes is complete. What stands in front of the head of a traceback is a prefix if
it stands in front of a frame, too, with other digits perhaps; from then on it is taken off every line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from piecegraph.explain.evidence import Process


class Line(NamedTuple):
    """A line without colours and prefixes."""

    number: int
    text: str
    record: str = ""
    """The record prefix: empty if there is none."""
    claim: str = ""
    """A worker's name inside the record prefix (``TP3``)."""
    is_mild: bool = False
    """Whether the record is less than an error, as the logger says."""


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")

_LOST_ANSI = re.compile(r"\[(?:0|1|4|[349]\d|[34]8;5;\d+)(?:;\d+)*m")
"""Colours whose escape character was lost on the way."""

_LINE_PREFIX = re.compile(
    r"""
    \[rank(?P<rank>\d+)\]:(?:[ ]|(?=\[)|$)                                    # torch.distributed's excepthook, c10d
  | \[(?P<role>[A-Za-z_][A-Za-z_.-]*\d+)\]:[ ]?                               # torchrun --tee
  | \((?:(?P<worker>[^()\s][^()]{0,79}?)[ ])?pid=(?P<pid>\d+)(?:,[ ]ip=(?P<ip>[\w.:]+))?\)[ ]?    # vLLM, Ray
  | \[(?:[\w.@-]*@)?(?P<job>\d+),(?P<mpi>\d+)\]<std(?:err|out)>:[ ]?          # mpirun --tag-output
  | \[pod/(?P<pod>[^\]\s]+)\][ ]                                              # kubectl logs --prefix
  | (?P<journal>[A-Z][a-z][a-z][ ][ \d]\d[ ]\d\d:\d\d:\d\d[ ]\S+[ ][\w./@-]+\[\d+\]:[ ])   # journalctl
  | (?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)[ ]      # docker logs -t
        (?:std(?:out|err)[ ][FP][ ])?)                                        # Kubernetes
    """,
    re.VERBOSE,
)
_WEAK_PREFIX = re.compile(
    r"[ ]{0,4}(?P<task>\d{1,5}):[ ]|(?P<service>[A-Za-z][\w.-]{0,62})[ ]+\|[ ]"
    r"|\[(?P<bare>\d{1,5})\](?::[ ]?|[ ])|(?P<replica>[A-Za-z][\w-]{0,62}/\d{1,5})[ ]"
)
"""srun --label, docker compose, MPICH's and Intel's mpirun, torchx. Ordinary text may look the same: see
:class:`PrefixReader`.
"""

_LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL"
_RECORD_PREFIX = re.compile(
    rf"""
    (?:{_LEVELS})[ ]\d\d-\d\d[ ]\d\d:\d\d:\d\d(?:\.\d+)?[ ]\[(?P<place>[^\]\s]+:\d+)\][ ]?     # vLLM
  | \[\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?                                # SGLang
        (?:[ ](?P<claim>(?:ATTN_)?(?:DP|TP|PP|EP|CP)\d+(?:[ ](?:DP|TP|PP|EP|CP)\d+)*))?\][ ]?
  | \[?[DIWEF]\d{{3,4}}[ ]\d\d:\d\d:\d\d\.\d+[ ](?:\d+[ ])?(?P<source>[\w./<>-]+:\d+)\][ ]?   # glog, torch
        (?:\[\d+/\d+(?:_\d+)?\][ ]?)?                                                # compile id
  | \d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?                                  # logging
        (?:[ ]?[-|:]?[ ](?![\w.]*(?:Error|Exception):)[\w.]+(?:-[\w.]+)*)?
        (?:[ ]?[-|:]?[ ](?:{_LEVELS})\b)?(?:[ ]?[-|:]|(?=[ ]))[ ]?
  | (?:{_LEVELS}):[\w.]+:                                                             # logging.basicConfig
    """,
    re.VERBOSE,
)
_MILD = re.compile(r"\b(?:DEBUG|WARN|WARNING)\b|^\[?[DW]\d{3,4} ")
"""Not INFO: whole outputs, tracebacks included, are passed on as such."""
_PROOF = re.compile(r'\s*(?:Traceback \(most recent call last\):|File "[^"]+", line \d+)')
_BEFORE_HEAD = re.compile(r"^(?P<prefix>\S.{0,120}?)[ ]?Traceback \(most recent call last\):\s*$")
_BEFORE_FRAME = re.compile(r'[ ]?\s*File "[^"]+", line \d+')
_RANK_INSIDE = re.compile(r"\[rank(?P<rank>\d+)\]")
_ESCAPED_END = "(most recent call last):\\n"
_QUOTED = re.compile(
    r'(?<![^\s:,=(\[{])(?:"(?P<json>(?:[^"\\]|\\.)*?\(most recent call last\):\\n(?:[^"\\]|\\.)*)"'
    r"|'(?P<repr>(?:[^'\\]|\\.)*?\(most recent call last\):\\n(?:[^'\\]|\\.)*)')(?=\s*[,}\])]|\s*$)"
)
"""A traceback in one line, as a text of JSON or as Python shows one."""
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
_LINE_PREFIX_STARTS = frozenset("[(2JFMASOND")
_RECORD_STARTS = frozenset("DIWECF[0123456789")
_MAX_PREFIXES = 4
_MAX_KNOWN = 4096
_MAX_LEARNED = 8


class PrefixReader:
    """Takes the prefixes off the lines of one log.

    A weak prefix (``3: ``, ``worker-1  | ``) is believed from the first line on that has the head or a frame of a
    traceback behind it, because then the launcher labels every line.
    """

    def __init__(self) -> None:
        self._known: dict[str, Process] = {}
        self._weak: set[str] = set()
        self._learned: dict[str, tuple[re.Pattern[str], bool]] = {}
        """Patterns of prefixes, and whether one stood in front of a frame: see Note [Learned prefixes]."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """Every process named by a line prefix so far."""
        return tuple(dict.fromkeys(self._known.values()))

    def note(self, raw: str) -> None:
        """Remember who wrote a line that is of no further interest."""
        found = _LINE_PREFIX.match(raw)
        if found is not None:
            self._process(found)

    def read(self, number: int, raw: str) -> list[tuple[Process, Line]]:
        """The line, or the several that a progress bar wrote over each other."""
        text = _ANSI.sub("", raw) if "\x1b" in raw else raw
        text = _LOST_ANSI.sub("", text) if "[0" in text or "[3" in text else text
        text = text.rstrip("\r")
        parts = _parts_of(text)
        if len(parts) == 1:
            return [self._read_one(number, parts[0])]
        read = [self._read_one(number, part) for part in parts]
        writer = read[0][0]  # a prefix stands in front of the first
        return [(who if who.label else writer, line) for who, line in read]

    def _read_one(self, number: int, text: str) -> tuple[Process, Line]:
        who = _NOBODY
        for _ in range(_MAX_PREFIXES):
            if text.startswith("  ") and not text[2:6].lstrip()[:1].isdigit():
                break  # a frame or its source: only padded task numbers begin like this
            found = _LINE_PREFIX.match(text) if text[:1] in _LINE_PREFIX_STARTS else None
            found = found or self._weak_prefix(text)
            if found is None:
                break
            who = _inside(who, self._process(found))
            text = text[found.end() :]
        record = _RECORD_PREFIX.match(text) if text[:1] in _RECORD_STARTS else None
        if record is None:
            text = _REPEATED.sub("", text) if "[repeated" in text else text
            who, text = self._without_learned(who, text)
            return who, Line(number, text)
        style = record["place"] or record["source"] or "logged"
        who, text = self._without_learned(who, text[record.end() :])
        return who, Line(number, text, style, record["claim"] or "", bool(_MILD.search(record[0])))

    def _without_learned(self, who: Process, text: str) -> tuple[Process, str]:
        """See Note [Learned prefixes]."""
        if text.endswith("(most recent call last):"):
            self._learn(text)
        for key, (pattern, is_proven) in self._learned.items():
            found = pattern.match(text)
            if found is not None and (is_proven or _BEFORE_FRAME.match(text, found.end())):
                self._learned[key] = (pattern, True)
                rank = _RANK_INSIDE.search(found[0])
                who = _inside(who, Process(f"rank{rank['rank']}", rank=int(rank["rank"]))) if rank else who
                return who, text[found.end() :]
        return who, text

    def _learn(self, text: str) -> None:
        before = _BEFORE_HEAD.match(text)
        if before is None or before["prefix"].endswith(("Group", "Original", "|", "+", "─")):
            return
        pattern = re.sub(r"\d+", r"\\d+", re.escape(before["prefix"])) + "[ ]?"
        if pattern not in self._learned and len(self._learned) >= _MAX_LEARNED:
            self._learned.pop(next(key for key in self._learned))
        is_proven = _RANK_INSIDE.search(before["prefix"]) is not None
        self._learned.setdefault(pattern, (re.compile(pattern), is_proven))

    def _weak_prefix(self, text: str) -> re.Match[str] | None:
        found = _WEAK_PREFIX.match(text)
        if found is None:
            return None
        kind = found.lastgroup or ""
        inner = _WEAK_PREFIX.match(text, found.end())  # torchx puts its own in front of torchrun's
        if kind not in self._weak and _PROOF.match(text, inner.end() if inner is not None else found.end()):
            self._weak.add(kind)
        return found if kind in self._weak else None

    def _process(self, found: re.Match[str]) -> Process:
        prefix = found[0]
        if found.lastgroup in ("time", "journal"):
            return _NOBODY
        known = self._known.get(prefix)
        if known is None:
            known = _describe(found)
            if len(self._known) < _MAX_KNOWN:
                self._known[prefix] = known
        return known


def _parts_of(text: str) -> list[str]:
    """The lines that were written into one: by a progress bar, with their ends escaped, or in a record of JSON."""
    if _ESCAPED_END in text:
        quoted = _QUOTED.search(text)
        if quoted is None:
            return text.replace('\\"', '"').split("\\n")
        before = text[: quoted.start()]
        told = quoted[quoted.lastgroup or 0].replace('\\"', '"').replace("\\'", "'").replace("\\\\", "\\")
        return [*([before] if before else []), *told.split("\\n")]
    if "\n" in text:
        return text.split("\n")
    return [part for part in text.split("\r") if part] or [""] if "\r" in text else [text]


_NOBODY = Process()
_RANK_IN_NAME = re.compile(r"\brank=(?P<rank>\d+)$")


def _describe(found: re.Match[str]) -> Process:
    parts = found.groupdict()
    if parts.get("rank"):
        return Process(f"rank{parts['rank']}", rank=int(parts["rank"]))
    if parts.get("mpi"):
        return Process(f"MPI rank {parts['mpi']}", rank=int(parts["mpi"]))
    if parts.get("pid"):
        name = parts["worker"] or f"pid {parts['pid']}"
        rank = _RANK_IN_NAME.search(name)
        return Process(name, int(rank["rank"]) if rank else None, int(parts["pid"]), parts["ip"])
    if parts.get("task"):
        return Process(f"task {parts['task']}")
    if parts.get("bare"):
        return Process(f"rank{parts['bare']}", rank=int(parts["bare"]))
    return Process(parts.get("replica") or parts.get("role") or parts.get("pod") or parts.get("service") or "")


def _inside(outer: Process, inner: Process) -> Process:
    """Two prefixes on one line: the service a container runs, and the worker inside it."""
    if not outer.label or not inner.label:
        return inner if inner.label else outer
    return Process(f"{outer.label} {inner.label}", inner.rank, inner.pid or outer.pid, inner.host or outer.host)
