"""What single lines of a log say beside its tracebacks: milestones, advice, memory, files, errors, exits.

Everything kept is bounded, so a log of any size is observed with the same memory.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from piecegraph.explain.evidence import Death, Exit, Milestone, Phase, Process, Stop
from piecegraph.explain.log.collectives import WORDS as COLLECTIVE_WORDS
from piecegraph.explain.log.collectives import WatchdogReports
from piecegraph.explain.log.deaths import WORDS as DEATH_WORDS
from piecegraph.explain.log.deaths import death_of
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.syntax import EXCEPTION_NAME, exception_of, mask

MAX_KEPT = 40
"""Of each sort; the page shows a few and the number of the others."""

MAX_TEXT = 200
MAX_ERROR = 400
"""Errors end with their place."""
MAX_RANKS = 4096

_MARKS: tuple[tuple[Phase, str, str], ...] = (
    ("init", "begun", r"Init torch distributed begin|Initializing an? (?:V1 )?LLM engine"
                      r"|vLLM API server version|server_args=ServerArgs"),
    ("init", "done", r"Init torch distributed ends|rank \d+ in world size \d+ is assigned as"),
    ("load", "begun", r"Load weight begin|Starting to load model|Loading (?:safetensors )?checkpoint shards:\s+0%"),
    ("load", "done", r"Load weight end|Loading weights took|Model loading took|checkpoint shards: 100%"),
    ("kv cache", "done", r"KV Cache is allocated|Memory pool end|GPU KV cache size:|# GPU blocks:"),
    ("compile", "begun", r"Using cache directory: \S+ for vLLM's torch\.compile|Dynamo bytecode transform time"),
    ("compile", "done", r"torch\.compile takes [\d.]+ s in total"),
    ("capture", "begun", r"Capture cuda graph b|Capturing (?:batches|CUDA graph|cudagraph)"),
    ("capture", "done", r"Capture cuda graph end|Graph capturing finished"),
    ("serve", "begun", r"The server is fired up|Application startup complete|Uvicorn running on|Prefill batch"
                       r"|Engine 0\d\d: Avg prompt"),
)  # fmt: skip
_MARK = re.compile("|".join(f"(?P<m{number}>{pattern})" for number, (_, _, pattern) in enumerate(_MARKS)))
_MARK_WORDS = (
    *(" distributed ", "LLM engine", "API server", "ServerArgs", "world size", "eight", "load model", "loading took"),
    *("shards:", "ache", "Memory pool", "GPU blocks", "torch.compile", "Dynamo bytecode", "apturing", "Capture cuda"),
    *("fired up", "startup complete", "Uvicorn", "Prefill batch", "Avg prompt"),
)
"""Every milestone holds one of these."""
_START = re.compile(
    r"^nohup: ignoring input|^Setting OMP_NUM_THREADS environment variable for each process"
    r"|^The following values were not passed to `accelerate launch`|^\*\* ComfyUI startup time"
    r"|\[runner\.py:\d+:main\] cmd = "
)
"""What launchers print once, when they start."""
_SIZE = re.compile(r"\b(?:bs=\d+|num_tokens=\d+)|\bbs \[(?P<one>\d+)\]|batch size (?P<size>\d+)")
_EXIT_LINE = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"
    r"|srun: error: (?P<host>\S+): tasks? (?P<task>[\d,-]+): Exited with exit code (?P<srun>\d+)"
    r"| exits with return code = (?P<returned>-?\d+)|Main process exited, code=exited, status=(?P<unit>\d+)/"
)
_MEMORY = re.compile(
    r"(?i:out of memory|outofmemory|out_of_memory|cannot allocate memory|oom.?kill|memory cgroup|bad_alloc)"
    r"|No available memory for the cache blocks|Killed process \d+"
)
_FREE_MEMORY = re.compile(r"avail[_ ]mem=(?P<free>[\d.]+ ?[GM]i?B)")
_ADVICE_HEAD = re.compile(r"(?i)(?:possible solutions?|suggestions?|you can try)\s*:\s*$")
_NUMBERED = re.compile(r"^\s*(?:\d+\.|[-*])\s+(?P<advice>\S.*)$")
_ADVICE = re.compile(
    r"(?:[Tt]ry (?:increasing|decreasing|reducing|setting|lowering)|[Cc]onsider (?:setting|reducing|using|passing)"
    r"|Please (?:set|try|increase|reduce)|Set TORCHDYNAMO_VERBOSE|[Rr]un with NCCL_DEBUG)[^.(\n]{2,120}"
)
_SAVED = re.compile(
    r"(?i:saved|written|dumped|dumping|wrote|writing|stored)\b[^/\n]{0,40}?(?P<path>/[^\s,;'\")]+)"
    r"|error_file\s*:\s*(?P<error_file>/\S+)|(?P<minifier>/\S*minifier\w*\.py)"
)
_LISTED = re.compile(r"^\s+- (?P<name>[\w./-]+\.\w+) \([\d,]+ bytes\)$")
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|(?:^|[ :])\[?[EF]\d{3,4} \d\d:\d\d:\d\d\.")
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING)\b|(?:^|[ :])\[?[DIW]\d{3,4} \d\d:\d\d:\d\d\.")
_BARE_ERROR = re.compile(
    r"^\s*(?:\S{1,200}: )?(?:fatal )?(?:[Ee]rror|ERROR|FATAL)(?:\[[\w-]+\]| [A-Z]{1,3}\d+)?: {1,8}\S"
    r"|: command not found$|^\S+: can't open file |^\S*python\S*: No module named |^\[ERROR\] "
    r"|(?:^|\| )!!! Exception during processing ?!!! \S|\] \S+:\d+ NCCL WARN \S|\[TensorRT-LLM\]\[ERROR\] "
    r"|\[TRT-LLM\](?: \[RANK \d+\])? \[E\] |^(?:\S+: )?Error response from daemon: "
    r"|^There are not enough slots available|^ErrorMessage \""
    r"|^(?:srv +\w+|main|\w{0,60}(?:llama|ggml|gguf|clip|common|whisper)\w{0,60}): .*\b(?:error|failed)\b"
    r"|^(?:E {3,}|FAILED |ERROR )\S*(?:Error|Exception|::)|^E {3,}assert |NVRM: Xid "
)
"""What programs print that do not log as Python does: argparse, shells, compilers, pip, ComfyUI, NCCL, TensorRT-LLM,
docker, mpirun, llama.cpp, SageMaker, pytest, the driver of NVIDIA."""
_STOP = re.compile(
    r"(?i:\b(?:received|caught|got|trigger received)(?: an?)? (?:signal[= ]|exit signal )?(?:SIGTERM|SIGINT|SIGHUP)"
    r"|\bSIG(?:TERM|INT|HUP)\b(?:/SIG\w+)? (?:was )?(?:received|caught)|received signal (?:2|15)\b"
    r"|\breceived (?:Signals\.SIG(?:TERM|INT)|2|15) death signal"
    r"|shutdown triggered|keyboard ?interrupt (?:received|detected)|interrupted by (?:the )?user)"
    r"|^\^C|\] KeyboardInterrupt|Detected KeyboardInterrupt"
)
"""How programs say that they were asked to end."""
_STOP_WORDS = ("SIG", "shutdown triggered", "nterrupt", "^C", "eceived signal ", " death signal")
_DEVICE_ASSERT = re.compile(r"^(?P<place>\S{1,300}?:\d+): .{0,300}?\bAssertion `(?P<check>[^`]{1,1000})` failed")
_GLOO_RANK = re.compile(r"\[Gloo\] Rank (?P<rank>\d+) is connected to [1-9]")

LinesAboveOf = Callable[[int], tuple[tuple[str, int | None], ...]]
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")
ERROR_WORDS = ("rror: ", "rror[", "xception: ", "command not found", "open file", "No module named",
    "from daemon", "not enough slots", "failed", "rror loading", "ErrorMessage", "E   ", "FAILED ", "NVRM: Xid ",
)  # fmt: skip
"""Beside those below; of interest as long as nothing has failed."""
_START_WORDS = ("ohup: ignoring", "Setting OMP_NUM", "values were not passed", "startup time", "runner.py")
_MEMORY_WORDS = ("memory", "Memory", "MEMORY", "OutOfMemory", "bad_alloc", "avail", "oom", "OOM", "Killed process")
_ADVICE_WORDS = (
    *(
        "olution",
        "uggestion",
        "can try",
        "try ",
        "ry setting",
        "Try ",
        "onsider ",
        "Please ",
        "VERBOSE=1",
        "NCCL_DEBUG",
    ),
)
_FILE_WORDS = (*("aved", "ritten", "rote ", "riting ", "tored", "umped", "umping", "error_file", "minifier", "bytes)"),)
WORDS = (
    *(
        *_MARK_WORDS,
        *_START_WORDS,
        *_MEMORY_WORDS,
        *_ADVICE_WORDS,
        *_FILE_WORDS,
        *_STOP_WORDS,
        *DEATH_WORDS,
        *COLLECTIVE_WORDS,
    ),
    *("ERROR", "CRITICAL", "FATAL", "[E", "[F", "during processing", "NCCL WARN", "TRT-LLM", "[TensorRT-LLM]"),
    *("[Gloo] Rank", "Assertion `", "NVRM: Xid "),
)
"""A line that says something observed here holds one of these: looking for them is far cheaper than the patterns."""


class Watched(NamedTuple):
    """The words that a block of a log holds, by what they may announce: few patterns need be tried."""

    all: tuple[str, ...] = ()
    mark: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    death: tuple[str, ...] = ()
    collective: tuple[str, ...] = ()


def watched_in(text: str, vocabulary: str, further: Iterable[str] = ()) -> Watched:
    """What to look for in a block; ``further`` words are of interest to the caller."""
    found = words_in(text, vocabulary, (*WORDS, *further))
    groups = (_MARK_WORDS, _START_WORDS, _MEMORY_WORDS, _ADVICE_WORDS, _FILE_WORDS, _STOP_WORDS, DEATH_WORDS)
    return Watched(found, *(tuple(word for word in group if word in found) for group in (*groups, COLLECTIVE_WORDS)))


def vocabulary_of(text: str) -> str:
    """Every word of a block of a log without its digits, once: in most blocks a few hundred, searched in no time."""
    return "\n".join(set(text.translate(_WITHOUT_DIGITS).split()))


def words_in(text: str, vocabulary: str, words: Iterable[str]) -> tuple[str, ...]:
    """Those of the words that a block of a log holds: only they need to be looked for in each of its lines."""
    return tuple(word for word in words if _longest_letters(word) in vocabulary and word in text)


@lru_cache(maxsize=4096)
def _longest_letters(word: str) -> str:
    return max(_LETTERS.findall(word), key=len, default="")


def has_any(text: str, words: tuple[str, ...]) -> bool:
    """Whether a line holds one of the words. A regular expression takes twice the time, any() half as much again."""
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


@dataclass(slots=True)
class Observations:
    """What was seen so far in one run."""

    milestones: dict[tuple[Phase, str], Milestone] = field(default_factory=dict)
    progress: dict[str, Milestone] = field(default_factory=dict)
    suggestions: dict[str, int] = field(default_factory=dict)
    memory_signs: list[tuple[str, int | None]] = field(default_factory=list)
    free_memory: tuple[str, int | None] | None = None
    artefacts: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    last_errors: deque[tuple[str, int | None]] = field(default_factory=lambda: deque(maxlen=3))
    exits: dict[Hashable, Exit] = field(default_factory=dict)
    deaths: dict[Hashable, Death] = field(default_factory=dict)
    stops: dict[str, Stop] = field(default_factory=dict)
    above: dict[int, tuple[tuple[str, int | None], ...]] = field(default_factory=dict)
    device_asserts: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    xids: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    watchdog: WatchdogReports = field(default_factory=WatchdogReports)
    ranks: set[int] = field(default_factory=set)
    workers: dict[str, Process] = field(default_factory=dict)
    last_line: tuple[str, int | None] | None = None
    _advice_until: int = 0

    def observe(self, line: Line, raw: str, process: Process, watched: Watched, lines_above: LinesAboveOf) -> None:
        """Look at a line for everything but milestones; ``raw`` is the line with its prefixes."""
        text, number = line.text, line.number
        if self.is_listing(number) or has_any(text, watched.advice):
            self._advice(number, text)
        if has_any(text, watched.memory):
            self._memory(number, text)
        if has_any(text, watched.files):
            self._files(text)
        if has_any(text, watched.collective):
            self.watchdog.read(text, number, process)
        self.keep_error(line, raw)
        if self._ending(text, number, process, watched) and len(self.above) < MAX_KEPT:
            self.above[number] = lines_above(number)
        rank = _GLOO_RANK.search(text)
        if rank is not None and len(self.ranks) < MAX_RANKS:
            self.ranks.add(int(rank["rank"]))
        if line.claim and len(self.workers) < MAX_RANKS:
            self.workers.setdefault(line.claim, Process(line.claim))

    def _memory(self, number: int, text: str) -> None:
        if len(self.memory_signs) < MAX_KEPT and _MEMORY.search(text):
            self.memory_signs.append((text.strip()[:MAX_TEXT], number))
        free = _FREE_MEMORY.search(text)
        if free is not None:
            self.free_memory = (free["free"], number)

    def keep_exit(self, ended: Exit) -> None:
        """Keep how a process ended, once: launchers say it in a line and in a table, which names the rank."""
        key = (ended.process.pid or (ended.process.label, ended.process.host), ended.code)
        known = self.exits.get(key)
        if known is None and len(self.exits) < MAX_KEPT:
            self.exits[key] = ended
        elif known is not None and known.process.rank is None:
            self.exits[key] = replace(ended, line=known.line)

    def keep_error(self, line: Line, raw: str) -> None:
        """Keep a line if it is an error: the first of each wording, and the last few."""
        text = line.text.strip()[:MAX_ERROR]
        if not text or not is_error(line, raw) or _exit_of_line(text, line.number) is not None:
            return
        self.last_errors.append((text, line.number))
        if len(self.errors) < MAX_KEPT:
            self.errors.setdefault(mask(text), (text, line.number))

    def _ending(self, text: str, number: int, process: Process, watched: Watched) -> bool:
        """Keep what a line tells of an end; whether it is one that somebody told of a process."""
        ended = _exit_of_line(text, number)
        if ended is not None:
            self.keep_exit(ended)
        if has_any(text, watched.stop) and len(self.stops) < MAX_KEPT and _STOP.search(text):
            stop = Stop(text=text.strip()[:MAX_TEXT], line=number, process=process)
            self.stops.setdefault(process.label, stop)
        death = death_of(text, number) if has_any(text, watched.death) else None
        if death is not None and len(self.deaths) < MAX_KEPT:
            who = death.process
            self.deaths.setdefault((death.name, who.pid or (who.label, who.host)), death)
        if "NVRM: Xid " in text and len(self.xids) < MAX_KEPT:
            said = text[text.index("NVRM: ") :].strip()[:MAX_TEXT]
            self.xids.setdefault(mask(said), (said, number))
        failed = _DEVICE_ASSERT.search(text) if "Assertion `" in text else None
        if failed is not None and len(self.device_asserts) < MAX_KEPT:
            place = failed["place"].replace("\\", "/").rpartition("/")[2]
            self.device_asserts.setdefault(f"{place}: assertion `{failed['check']}` failed", (text, number))
        return ended is not None or death is not None

    def is_listing(self, number: int) -> bool:
        """Whether advice was announced a few lines above, so that every line counts."""
        return number <= self._advice_until

    def keep(self, milestone: Milestone) -> None:
        """The first that says a phase has begun, the last that says it is done, and the size it had come to."""
        if len(self.progress) < MAX_RANKS or milestone.process.label in self.progress:
            self.progress[milestone.process.label] = milestone
        key = (milestone.phase, milestone.state)
        known = self.milestones.get(key)
        if known is None or milestone.state == "done":
            self.milestones[key] = milestone
        elif milestone.size or milestone.phase == "serve":
            self.milestones[milestone.phase, "latest"] = milestone

    def _advice(self, number: int, text: str) -> None:
        if _ADVICE_HEAD.search(text):
            self._advice_until = number + 8
            return
        found = _NUMBERED.match(text) if self.is_listing(number) else None
        advice = found["advice"] if found else None
        if advice is None:
            loose = _ADVICE.search(text)
            advice = loose[0] if loose else None
        if advice is not None and len(self.suggestions) < MAX_KEPT:
            self.suggestions.setdefault(advice.strip()[:MAX_TEXT], number)

    def _files(self, text: str) -> None:
        listed = _LISTED.match(text)
        if listed is not None and self.artefacts:
            names = self.artefacts[next(reversed(self.artefacts))]
            if len(names) < MAX_RANKS:
                names.append(listed["name"])
            return
        saved = _SAVED.search(text)
        if saved is not None and len(self.artefacts) < MAX_KEPT:
            path = saved["path"] or saved["error_file"] or saved["minifier"]
            self.artefacts.setdefault(path.rstrip(".:"), [])


def is_error(line: Line, raw: str) -> bool:
    """Whether a line is logged as an error, or printed as one."""
    if line.record:
        if _ERROR.search(raw):
            return True
        if _LEVEL.search(raw):
            return False
    if _BARE_ERROR.search(line.text):
        return True
    read = exception_of(line.text)
    return read is not None and bool(read[1]) and EXCEPTION_NAME.search(read[0]) is not None


def is_start(text: str) -> bool:
    """Whether a launcher says that it starts a run.

    >>> is_start("nohup: ignoring input and appending output to 'nohup.out'")
    True
    """
    return _START.search(text) is not None


def milestone_of(text: str, line: int | None) -> Milestone | None:
    """What a line says was begun or done.

    >>> milestone_of("Capturing batches (bs=1 avail_mem=12.33 GB):   0%", 115).size
    'bs=1'
    """
    found = _MARK.search(text)
    if found is None:
        return None
    assert found.lastgroup is not None
    phase, state, _ = _MARKS[int(found.lastgroup[1:])]
    size = _SIZE.search(text)
    shown = (f"bs={size['one'] or size['size']}" if size["one"] or size["size"] else size[0]) if size else ""
    return Milestone(phase, "done" if state == "done" else "begun", found[0], line, shown if phase == "capture" else "")


# -- launchers


def _exit_of_line(text: str, line: int | None) -> Exit | None:
    """``failed (exitcode: -9) local_rank: 3 (pid: 1234) of binary: ...``."""
    found = _EXIT_LINE.search(text) if "xit" in text else None
    if found is None:
        return None
    if found["task"]:
        return Exit(process=Process(f"task {found['task']}", host=found["host"]), code=int(found["srun"]), line=line)
    if found["returned"] or found["unit"]:
        who = Process("a process of the launcher" if found["returned"] else "the main process of the unit")
        return Exit(process=who, code=int(found["returned"] or found["unit"]), line=line)
    return Exit(
        process=Process(f"local rank {found['local']}", pid=int(found["pid"])), code=int(found["code"]), line=line
    )
