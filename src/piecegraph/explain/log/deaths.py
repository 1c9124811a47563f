"""Lines that tell of a death: a process that was killed or crashed, a job that its scheduler ended.

One line in, a :class:`Death` out. Each rule is the wording of one teller (a shell, the kernel, a launcher, a scheduler,
a crash handler), never a word like "killed" alone, which any text may hold.
"""

from __future__ import annotations

import re
import signal

from piecegraph.explain.evidence import Death, Process, Teller, signal_name

MAX_TEXT = 240
_BY_DESCRIPTION = {
    "hangup": signal.SIGHUP,
    "interrupt": signal.SIGINT,
    "quit": signal.SIGQUIT,
    "illegal instruction": signal.SIGILL,
    "trace/breakpoint trap": signal.SIGTRAP,
    "aborted": signal.SIGABRT,
    "abort trap": signal.SIGABRT,
    "abort": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "floating point exception": signal.SIGFPE,
    "killed": signal.SIGKILL,
    "user defined signal 1": signal.SIGUSR1,
    "segmentation fault": signal.SIGSEGV,
    "user defined signal 2": signal.SIGUSR2,
    "terminated": signal.SIGTERM,
}
_DESCRIPTIONS = "|".join(sorted((re.escape(words) for words in _BY_DESCRIPTION), key=len, reverse=True))
_FROM_A_SHELL = "|".join(
    re.escape(words[0].upper() + words[1:]) for words in sorted(_BY_DESCRIPTION, key=len, reverse=True)
)
"""Capitalised, as shells print them: a small word alone in a line may be anything."""
_STATES = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL", "JOB REQUEUE": "REQUEUED"}
_BAR_END = r"<[\d:?]{1,12}, {1,3}[^<]{1,200}\]"
"""Of a progress bar of tqdm: ``[02:31<03:05, 2.97it/s, loss=2.31]``, whatever the unit and the postfix."""
_BAR = re.compile(rf".*{_BAR_END}")
_SHELL_LIMIT = 128
"""A shell adds this to the number of the signal that ended a command."""

_RULES: tuple[tuple[Teller, str], ...] = (
    # slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2025-05-02T03:58:46 DUE TO TIME LIMIT ***
    ("scheduler", r"\*\*\* (?:JOB|STEP) \S+ ON \S+ (?P<state>CANCELLED) AT \S+"
                  r"(?: DUE (?:TO|to) (?P<why>[A-Z]+(?: [A-Z]+)*\b)?[^*]*)? \*\*\*"),
    ("scheduler", r"PBS: job killed: (?P<pbs>walltime|mem|vmem)\b"
                  r"|(?P<lsf>TERM_RUNLIMIT|TERM_MEMLIMIT|TERM_OWNER): job"),
    ("scheduler", r"(?P<oom>[Dd]etected \d+ oom[-_]kill event)|(?P<k8s>\bOOMKilled\b)"),
    ("scheduler", r"(?P<limit>[Ee]xceeded (?:job|step) memory limit"
                  r"|exceeded memory limit \(\d+ > \d+\), being killed)"),
    ("scheduler", r"srun: error: (?P<host>\S+): tasks? (?P<task>[\d,-]+): (?P<srun_oom>Out Of Memory)"),
    ("scheduler", r"srun: error: (?P<host>\S+): tasks? (?P<task>[\d,-]+): (?P<words>{words})\b"),
    ("scheduler", r"(?P<evicted>^(?:Message: +)?The node was low on resource: \S|^Reason: +Evicted$)"),
    ("launcher", r"^timeout: sending signal (?P<timeout>TERM|KILL) to command "),
    ("launcher", r"Main process exited, code=(?:killed|dumped), status=(?P<number>\d+)/"
                 r"|(?P<unit_oom>A process of this unit has been killed by the OOM killer)"),
    ("process", r"^(?:Program|Thread .{{1,80}}) received signal (?P<sig>SIG[A-Z]+), "),
    ("kernel", r"[Oo]ut of memory: [Kk]illed process (?P<pid>\d+)|oom-kill:.*\bpid=(?P<pid2>\d+)"),
    ("launcher", r"(?P<raylet>[Ww]orkers? \(tasks / actors\) killed due to memory pressure)"),
    ("launcher", r"(?P<lost>A worker died or was killed while executing a task)"
                 r"(?:.{{0,600}}?Worker PID: (?P<pid>\d+))?"),
    ("shell", r"^(?:\S.{{0,200}}?: line \d+: +)?(?:(?P<pid>\d+) )?(?P<words>{shell})"
              r"(?:: \d{{1,2}})?(?: +\(core dumped\))?(?:  +\S.*)?$"),
    ("shell", r"^(?:zsh: (?:\S+ )?|\[\d+\][+-]? +)(?:(?P<pid>\d+) +)?(?:exit \d+ +)?(?P<words>{words})\b(?! by)"),
    ("shell", rf"{_BAR_END.replace('{', '{{').replace('}', '}}')}(?P<words>{{words}})(?: +\(core dumped\))?$"),
    ("launcher", r"failed \(exitcode: (?P<code>-\d+)\)(?: local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\))?"),
    ("launcher", r"Signal (?P<number>\d+) \(SIG\w+\) received by PID (?P<pid>\d+)"),
    ("launcher", r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) "
                 r"exited on signal (?P<number>\d+)"),
    ("launcher", r"EXIT STRING: (?:{words}) \(signal (?P<number>\d+)\)"),
    ("launcher", r"died with <Signals\.(?P<sig>SIG[A-Z]+)"),
    ("launcher", r"Failed core proc\(s\): \{{'(?P<who>\w+)': (?P<code>-\d+)"),
    # "said": the words are anybody's, so what stands around them is looked at
    ("launcher", r"(?P<said>)(?:terminated|killed|died|exited|ended|crashed) (?:\w+ )?(?:with|by|on|of|from|due to) "
                 r"signal:? (?:(?P<sig>SIG[A-Z]+)|(?P<number>\d+)|(?P<words>{words}))"),
    ("launcher", r"(?P<said>)(?i:exit(?:ed|s)?(?: with)?(?: an)?(?: exit)?[ _]?(?:status|code)|return ?code)"
                 r"\s*(?:is|of|:|=)?\s*(?P<code>-\d{{1,2}}|1[2-5]\d)\b(?!\.\d)"),
    ("launcher", r"(?i:exit(?:ed with)?(?: exit)? code):? (?P<ntstatus>-1073\d{{6}}|3221\d{{6}})\b"),
    ("process", r"Exception Code: (?P<hex_status>0xC[0-9A-F]{{7}})(?![0-9A-Fa-f])"),
    ("launcher", r"(?:[Ww]orker|[Ee]ngine core) proc(?:ess)? (?P<who>\w[\w.-]*) died unexpectedly"
                 r"|\b(?P<who2>EngineCore\w*) died unexpectedly"
                 r"|\b(?P<who3>[Rr]ank \d+ scheduler|Scheduler \d+) (?:is dead|died)"),
    ("process", r"Caught signal (?P<number>\d+) \((?:{words})"),
    ("process", r"^\*\*\* (?P<sig>SIG[A-Z]+) (?:\(@?0x\w+\) )?received (?:at time|by PID)"),
    ("process", r"\] Signal: (?P<words>{words}) \(\d+\)$"),
    ("process", r"(?P<segfault>!{{3,}} Segfault encountered !{{3,}})"),
    ("process", r"(?P<glibc>^(?:double free or corruption|free\(\): invalid|malloc\(\): |corrupted (?:size vs|double)|"
                r"munmap_chunk\(\): invalid|malloc_consolidate\(\))|\*\*\* stack smashing detected"
                r"|\*\*\* Error in .{{1,120}}: (?:free|malloc|munmap_chunk|double free|corrupted))"),
    ("process", r"(?P<bus>ERROR: Unexpected bus error encountered in worker)"
                r"|(?P<segv>ERROR: Unexpected segmentation fault encountered in worker)"),
)  # fmt: skip
_COMPILED = tuple(
    (teller, re.compile(pattern.format(words=rf"(?i:{_DESCRIPTIONS})", shell=_FROM_A_SHELL)))
    for teller, pattern in _RULES
)
_IN_GENERAL = re.compile(
    r"(?i)\b(?:if|when|whenever|why|how|may|might|could|would|should|answer|question|prompt|generated|completion|assistant)\b"
)
_EXPLAINED = re.compile(r"(?i)[\s\"'`,]*(?:usually |typically |often )?(?:means?|meaning|is|are|indicates?|stands)\b")
WORDS = (
    *("*** JOB", "*** STEP", "srun: ", "PBS: job", "TERM_", "oom", "OOM", "illed", "memory pressure", "SIG", "ignal"),
    *("memory limit", "Out Of Memory", "worker died or", "Exception Code: 0xC"),
    *(
        "xit",
        "eturn code",
        "low on resource",
        "Evicted",
        "eturncode",
        "EXIT",
        "erminated",
        "bort",
        "ump",
        "us error",
        "egmentation fault",
        "Segfault",
    ),
    *("llegal inst", "loating point", "angup", "Quit", "breakpoint trap", "User defined", "died", "is dead", "proc(s)"),
    *("double free", "free(): ", "malloc", "corrupted ", "stack smashing", "munmap_chunk"),
)
"""A line that tells of a death holds one of these."""
_BY_GROUP = {
    "oom": "OUT_OF_MEMORY", "k8s": "OUT_OF_MEMORY", "raylet": "OUT_OF_MEMORY", "limit": "OUT_OF_MEMORY",
    "srun_oom": "OUT_OF_MEMORY", "unit_oom": "OUT_OF_MEMORY", "evicted": "EVICTED", "timeout": "TIMEOUT",
    "segfault": "SIGSEGV", "segv": "SIGSEGV", "glibc": "SIGABRT", "bus": "SIGBUS",
}  # fmt: skip
_SCHEDULER_WORDS = {
    "walltime": "TIMEOUT", "TERM_RUNLIMIT": "TIMEOUT", "mem": "OUT_OF_MEMORY", "vmem": "OUT_OF_MEMORY",
    "TERM_MEMLIMIT": "OUT_OF_MEMORY", "TERM_OWNER": "CANCELLED",
}  # fmt: skip


def death_of(text: str, line: int | None) -> Death | None:
    """What a line tells, if it tells of a death.

    >>> death_of("run.sh: line 3: 4242 Killed                  python train.py", 9).name
    'SIGKILL'
    >>> death_of("Killed two birds with one stone", 9) is None
    True
    """
    text = text.strip()
    for teller, pattern in _COMPILED:
        found = pattern.search(text)
        if found is not None:
            is_prose = "said" in found.re.groupindex and _is_prose(text[: found.start()], text[found.end() :])
            death = _read(teller, found, text, line) if not is_prose else None
            if death is not None:
                return death
    return None


def tells_death(text: str) -> bool:
    """Whether a line tells of a death: nearly all lines are dismissed without a pattern."""
    for word in WORDS:  # any() takes half as much time again
        if word in text:
            return death_of(text, None) is not None
    return False


def _is_prose(before: str, behind: str) -> bool:
    """Whether words that anybody may write are about deaths in general, or an answer of a model."""
    return bool(_IN_GENERAL.search(before.rpartition(". ")[2]) or _EXPLAINED.match(behind))


def _read(teller: Teller, found: re.Match[str], text: str, line: int | None) -> Death | None:
    parts = {name: value for name, value in found.groupdict().items() if value is not None}
    number, code = _signal_of(parts), int(parts["code"]) if "code" in parts else None
    if number is not None:
        name = signal_name(number)
    elif "ntstatus" in parts or "hex_status" in parts:
        code = int(parts.get("ntstatus") or parts["hex_status"], 0)
        name = f"0x{code & 0xFFFFFFFF:X}"  # as Windows' documentation has it
    elif code is not None:
        return None  # an exit code that is no signal's
    else:
        name = _state_of(parts)
    return Death(
        name=name, teller=teller, text=_excerpt(text, found), signal=number, code=code, process=_process_of(parts),
        line=line,
    )  # fmt: skip


def _excerpt(text: str, found: re.Match[str]) -> str:
    """The line without the progress bar it is glued to; of a long one the part that tells."""
    told = found.start("words") if "words" in found.re.groupindex and found["words"] else found.start()
    bar = _BAR.match(text[:told])
    start = bar.end() if bar is not None else 0
    if found.end() - start > MAX_TEXT:
        start = max(start, min(told, found.end() - MAX_TEXT))
    return ("" if bar is not None or not start else "... ") + text[start : start + MAX_TEXT]


def _signal_of(parts: dict[str, str]) -> int | None:
    if "number" in parts:
        return int(parts["number"])
    if "words" in parts:
        return int(_BY_DESCRIPTION[parts["words"].lower()])
    if "code" in parts:
        code = int(parts["code"])
        if code == -1:
            return None  # what many programs exit with, and hardly ever SIGHUP
        number = -code if code < 0 else code - _SHELL_LIMIT
        return number if 0 < number <= signal.SIGSYS else None
    if "lost" in parts:
        return None
    if parts.keys() & {"pid", "pid2"}:
        return int(signal.SIGKILL)  # the kernel's words alone have a pid and no signal
    named = parts.get("sig") or next((_BY_GROUP[group] for group in parts if group in _BY_GROUP), "")
    return int(signal.Signals[named]) if named in signal.Signals.__members__ else None


def _state_of(parts: dict[str, str]) -> str:
    if "state" in parts:
        return _STATES.get(parts.get("why", ""), parts["state"])
    words = parts.get("pbs") or parts.get("lsf") or ""
    named = next((_BY_GROUP[group] for group in parts if group in _BY_GROUP), "")
    return _SCHEDULER_WORDS.get(words) or named or "process died"


def _process_of(parts: dict[str, str]) -> Process:
    pid = int(parts.get("pid") or parts.get("pid2") or 0) or None
    host = parts.get("host")
    if "rank" in parts:
        return Process(f"rank{parts['rank']}", int(parts["rank"]), pid, host)
    if "task" in parts:
        return Process(f"task {parts['task']}", host=host)
    if "local" in parts:
        return Process(f"local rank {parts['local']}", pid=pid)
    label = parts.get("who") or parts.get("who2") or parts.get("who3") or (f"pid {pid}" if pid else "")
    return Process(label, pid=pid, host=host)
