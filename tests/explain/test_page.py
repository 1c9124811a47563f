"""The page: first failures and echoes, phases, advice, several runs, and what is said where nothing failed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from piecegraph.explain.advice import judge_suggestions
from piecegraph.explain.as_json import SCHEMA, to_dict
from piecegraph.explain.evidence import Evidence, Exit, Failure, Frame, Milestone, Process, Raised
from piecegraph.explain.frames import place_of
from piecegraph.explain.log.scan import Scanner
from piecegraph.explain.page import Page, compose, fold
from piecegraph.explain.render import to_markdown, to_text
from piecegraph.explain.report_page import to_html, to_report
from piecegraph.explain.root_cause import find_root_cause, triage
from tests.explain.log.test_lines import TRACEBACK, prefixed, scan

CALL_CHAIN = "\n".join(
    f'[rank0]:   File "/home/me/src/{file}", line {line}, in {name}\n[rank0]:     {source}'
    for file, line, name, source in [
        ("sglang/python/sglang/srt/model_executor/cuda_graph_runner.py", 378, "__init__", "self.capture()"),
        ("pytorch/torch/nn/modules/module.py", 1773, "_wrapped_call_impl", "return self._call_impl(*args)"),
        ("pytorch/torch/nn/modules/module.py", 1784, "_call_impl", "return forward_call(*args)"),
        ("sglang/python/sglang/srt/models/llama.py", 194, "forward", "qkv, _ = self.qkv_proj(hidden_states)"),
        ("sglang/python/sglang/srt/layers/unquant.py", 131, "apply", "return F.linear(x, weight)"),
    ]
)


def page_of(text: str) -> Page:
    return compose(scan(text), ())


def failing(type: str, message: str = "", *, file: str = "/srv/a.py", line: int = 1, count: int = 1) -> Failure:
    raised = Raised(type=type, message=message, frames=(Frame(file, 3, "f", f"raise {type}()"),))
    return Failure(chain=(raised,), count=count, line=line)


def evidence(*failures: Failure, **more: object) -> Evidence:
    return Evidence(sources=("run.log",), num_lines=9, failures=failures, **more)  # type: ignore[arg-type]


# -- no failure


def test_a_call_chain_without_an_exception_is_no_failure() -> None:
    page = page_of("notes on a stack:\n" + CALL_CHAIN)
    text = to_text(page)
    assert page.outcome == "call chains"
    assert "1 call chain, no exception" in text
    assert "ends at       sglang/srt/layers/unquant.py:131 in apply" in text
    assert "... 2 frames in torch: _wrapped_call_impl to _call_impl" in text, (
        "a checkout of torch is a library all the same"
    )
    assert page.root is None


def test_a_log_with_neither_says_what_it_holds() -> None:
    page = page_of("loading\nERROR 05-08 19:06:38 [a.py:7] no such model: foo\nbye")
    text = to_text(page)
    assert page.outcome == "nothing"
    assert "none found: nothing in 3 lines reads like a traceback or like the end of a process" in text
    assert "error line    line 2: no such model: foo" in text
    assert "last line     line 3: bye" in text


def test_a_traceback_that_was_cut_off_says_so() -> None:
    page = page_of(TRACEBACK.rpartition("\n")[0])
    assert page.outcome == "call chains"
    text = to_text(page)
    assert "has no exception text: it was cut off" in text
    assert text.startswith("something failed: a traceback whose exception is not in this log")
    assert not to_text(page_of(CALL_CHAIN)).startswith("something failed")


# -- first failures and echoes


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1234"),
        ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"),
        ("torch.distributed.DistBackendError", "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(...)"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError", ""),
        ("RuntimeError", "Engine core initialization failed. See root cause above."),
        ("torch.multiprocessing.spawn.ProcessRaisedException", ""),
        ("EOFError", ""),
    ],
)
def test_an_echo_is_not_the_root_even_if_it_is_printed_first(type: str, message: str) -> None:
    echo, cause = failing(type, message, line=5, count=7), failing("ValueError", "bad weights", line=20)
    found = triage(evidence(echo, cause))
    assert found.root is cause
    assert found.echoes == (echo,)


@pytest.mark.parametrize(
    ("failure", "is_echo"),
    [
        (
            failing(
                "BrokenPipeError", "[Errno 32] Broken pipe", file="/usr/lib/python3.11/multiprocessing/connection.py"
            ),
            True,
        ),
        (failing("torch.distributed.DistBackendError", "NCCL error: remote process exited"), True),
        (failing("EOFError", "Ran out of input", file="/x/site-packages/torch/serialization.py"), False),
        (failing("ConnectionRefusedError", "[Errno 111]", file="/usr/lib/python3.11/http/client.py"), False),
        (failing("ValueError", "bad"), False),
    ],
)
def test_a_log_of_echoes_alone_is_called_that(failure: Failure, is_echo: bool) -> None:
    page = compose(evidence(failure), ())
    assert page.who.has_only_echoes == is_echo
    assert ("such a failure comes when another process fails or hangs" in to_text(page)) == is_echo


def test_a_failure_after_which_the_run_went_on_is_not_the_root() -> None:
    early, late = failing("ImportError", "no apex", line=5), failing("ValueError", "bad", line=50)
    done = Milestone("load", "done", "Load weight end", 30)
    assert triage(evidence(early, late, milestones=(done,))).root is late
    assert triage(evidence(early, late, milestones=(done,))).survived == (early,)
    assert triage(evidence(early, milestones=(done,))).root is early, "unless there is no other"


def test_what_python_itself_ignored_is_not_the_root() -> None:
    page = page_of(
        "Exception ignored in: <function Pool.__del__ at 0x7f0>\n" + TRACEBACK.replace("nan", "inf") + "\n" + TRACEBACK
    )
    assert page.root is not None
    assert page.root.message == "loss is nan"
    assert [group.role for group in page.who.groups] == ["root", "survived"]


TABLE = """\
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-10-21_19:07:57
  host      : node1
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 1203)
  error_file: /tmp/err/3.json
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-10-21_19:07:55
  host      : node1
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 1202)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 1202
============================================================
bye"""


def test_the_table_of_torchelastic() -> None:
    page = page_of(prefixed("[rank3]: ") + "\n" + TABLE)
    assert [group.role for group in page.who.groups] == ["root", "echo"]
    first, second = page.who.exits
    assert first == Exit(process=Process("rank2", 2, 1202, "node1"), code=-9, is_first=True, line=first.line)
    assert (second.process.rank, second.code, second.is_first) == (3, 1, False)
    text = to_text(page)
    assert "rank2 (pid 1202, on node1) was the first to end (killed by SIGKILL)" in text.replace("\n" + " " * 16, " ")
    assert page.artefacts == ("/tmp/err/3.json",)


def test_a_launcher_that_saw_a_process_killed_and_no_traceback() -> None:
    page = page_of(
        "E1021 19:07:57.030000 12 torch/distributed/elastic/api.py:882] failed (exitcode: -9) local_rank: 3 (pid: 77)"
    )
    assert page.root is not None
    assert page.root.type == "SIGKILL"
    assert [exit.code for exit in page.who.exits] == [-9]


def test_a_launcher_that_saw_a_process_fail_and_no_traceback() -> None:
    page = page_of("srun: error: n1: task 0: Exited with exit code 1\nbye")
    assert page.outcome == "exits"
    text = to_text(page)
    assert "a launcher saw processes fail; no exception in this log" in text
    assert "1 x exit code 1" in text


def engine_log() -> str:
    """A worker of an engine runs out of memory; its parent and the server say so in their own words."""
    worker, core = "(VllmWorker rank=1 pid=202) ", "(EngineCore_0 pid=100) "
    died = TRACEBACK.replace("in step", "in determine_available_memory").replace(
        "ValueError: loss is nan", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    words = "RuntimeError: Worker failed with error 'CUDA out of memory', please check the stack trace above"
    return "\n".join(
        [
            "INFO 05-08 19:05:01 [api_server.py:1043] vLLM API server version 0.8.5",
            f"{worker}INFO 05-08 19:05:20 [gpu_model_runner.py:1329] Starting to load model foo...",
            f"{worker}INFO 05-08 19:05:40 [loader.py:458] Loading weights took 5.33 seconds",
            prefixed(f"{worker}ERROR 05-08 19:06:38 [multiproc_executor.py:962] ", died),
            prefixed(f"{core}ERROR 05-08 19:06:39 [core.py:396] ", TRACEBACK.replace("ValueError: loss is nan", words)),
            TRACEBACK.replace(
                "ValueError: loss", "RuntimeError: Engine core initialization failed. See root cause above."
            ),
        ]
    )


def test_an_engine_that_repeats_its_workers_failure() -> None:
    page = page_of(engine_log())
    assert [(group.role, group.type.rsplit(".")[-1]) for group in page.who.groups] == [
        ("root", "OutOfMemoryError"), ("echo", "RuntimeError"), ("echo", "RuntimeError"),
    ]  # fmt: skip
    assert [process.rank for process in page.who.groups[0].processes] == [1]
    assert {row.phase: row.state for row in page.phase.rows} == {"init": "passed", "load": "done", "kv cache": "failed"}
    assert "which process printed 1 of them: the lines carry no name" in to_text(page)


# -- several runs


def test_several_runs_in_one_file() -> None:
    run = "[2025-10-21 19:07:30 TP0] Init torch distributed begin.\n{}\n"
    text = run.format(TRACEBACK) + run.format(
        "[2025-10-21 19:08:00 TP0] Init torch distributed ends.\n" + TRACEBACK.replace("nan", "inf")
    )
    scanner = Scanner()
    scanner.begin_log("run.log", "")
    scanner.feed(text.split("\n"))
    first, second = scanner.finish()
    assert [run.failures[0].chain[0].message.split()[2] for run in (first, second)] == ["nan", "inf"]
    assert (first.failures[0].count, second.failures[0].count) == (1, 1)
    assert [milestone.state for milestone in first.milestones] == ["begun"]
    assert [milestone.state for milestone in second.milestones] == ["begun", "done"]
    page = to_text(compose(second, (), other_runs=[first]))
    assert "ValueError: loss is inf" in page
    assert "other run, lines 1 to " in page
    assert "ValueError: loss is nan" in page


# -- ownership, root causes, phases, advice


@pytest.mark.parametrize(
    ("file", "owner", "path"),
    [
        ("/usr/lib/python3.12/site-packages/torch/fx/proxy.py", "library", "torch/fx/proxy.py"),
        ("/home/me/pytorch/torch/nn/modules/module.py", "library", "torch/nn/modules/module.py"),
        ("/home/me/torch/train.py", "user", "/home/me/torch/train.py"),
        ("/opt/sglang/python/sglang/srt/models/llama.py", "engine", "sglang/srt/models/llama.py"),
        ("/usr/lib/python3.12/dist-packages/vllm/v1/engine/core.py", "engine", "vllm/v1/engine/core.py"),
        ("/usr/lib/python3.12/site-packages/foo/bar.py", "library", "foo/bar.py"),
        ("/usr/lib/python3.12/multiprocessing/process.py", "python", "multiprocessing/process.py"),
        ("<frozen runpy>", "python", "runpy"),
        ("/srv/app/train.py", "user", "/srv/app/train.py"),
        (r"C:\env\Lib\site-packages\torch\fx\proxy.py", "library", "torch/fx/proxy.py"),
    ],
)
def test_frames_are_classified_by_package_before_path(file: str, owner: str, path: str) -> None:
    assert (place_of(file).owner, place_of(file).path) == (owner, path)


def test_library_frames_fold_and_the_innermost_stays() -> None:
    torch = [Frame("/x/site-packages/torch/nn/a.py", n, f"t{n}") for n in range(3)]
    numpy = Frame("/x/site-packages/numpy/b.py", 1, "n")
    user = Frame("/srv/a.py", 1, "u")
    lines = fold([user, *torch, numpy, user, *torch])
    assert [line.folded or line.frame.function for line in lines if line.frame or line.folded] == [
        "u", "3 frames in torch: t0 to t2", "1 frame in numpy: n", "u", "2 frames in torch: t0 to t1", "t2",
    ]  # fmt: skip
    assert [line.is_innermost for line in lines][-2:] == [False, True]


def test_the_cause_inside_a_wrapper_needs_the_innermost_line_or_a_known_wrapper() -> None:
    def cause(type: str, source: str) -> str:
        frames = (Frame("/srv/a.py", 3, "f", source),)
        message = "it failed:\nKeyError: 'w'"
        return find_root_cause(Failure(chain=(Raised(type=type, message=message, frames=frames),))).type

    assert cause("RuntimeError", "raise KeyError(name)") == "KeyError"
    assert cause("RuntimeError", "raise RuntimeError(text)") == "RuntimeError"
    assert cause("torch._dynamo.exc.BackendCompilerFailed", "") == "KeyError"


RAY = """\
Traceback (most recent call last):
  File "/srv/driver.py", line 9, in <module>
    ray.get(worker.run.remote())
ray.exceptions.RayTaskError(ValueError): ray::Worker.run() (pid=88, ip=10.0.0.7)
  File "/srv/worker.py", line 41, in run
    raise ValueError("bad batch")
ValueError: bad batch"""


def test_a_remote_exception_is_found_inside_rays() -> None:
    root = page_of(RAY).root
    assert root is not None
    assert (root.type, root.message) == ("ValueError", "bad batch")
    assert root.frame is not None
    assert (root.frame.file, root.frame.line) == ("/srv/worker.py", 41)


def test_the_process_that_spawn_reports_is_the_root() -> None:
    text = (
        TRACEBACK.replace("ValueError: loss is nan", "torch.multiprocessing.spawn.ProcessRaisedException: \n")
        + "\n-- Process 1 terminated with the following error:\n"
        + TRACEBACK
    )
    page = page_of(text)
    assert page.root is not None
    assert page.root.type == "ValueError"


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/srv/a.py", line 3, in <module>
  |     main()
  | ExceptionGroup: two failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/srv/a.py", line 8, in work
    |     raise ValueError("one")
    | ValueError: one
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/srv/a.py", line 9, in work
    |     raise KeyError("two")
    | KeyError: 'two'
    +------------------------------------"""


def test_the_members_of_a_group_come_before_the_group() -> None:
    page = page_of(GROUP)
    assert [(group.role, group.type) for group in page.who.groups] == [
        ("root", "ValueError"), ("other", "KeyError"), ("echo", "ExceptionGroup"),
    ]  # fmt: skip


def test_errors_that_the_gpu_reports_late_say_so() -> None:
    page = page_of(
        TRACEBACK.replace(
            "ValueError: loss is nan", "RuntimeError: CUDA error: an illegal memory access was encountered"
        )
    )
    assert "the GPU reports such an error late" in to_text(page)


def test_memory_advice_fits_where_memory_ran_out() -> None:
    advice = (("Try increasing `gpu_memory_utilization`", 7),)
    short = evidence(failing("torch.OutOfMemoryError", "CUDA out of memory."), suggestions=advice)
    (judged,) = judge_suggestions(short, short.failures[0], None)
    assert judged.fit == "fits"
    plenty = evidence(failing("ValueError", "bad"), suggestions=advice)
    (judged,) = judge_suggestions(plenty, plenty.failures[0], None)
    assert (judged.fit, judged.why) == ("does not fit", "no sign of memory shortage")
    killed = evidence(failing("ValueError", "bad"), suggestions=advice, memory_signs=(("oom-kill", 3),))
    (judged,) = judge_suggestions(killed, killed.failures[0], None)
    assert judged.why == "memory ran out, says line 3"


def test_compile_inside_capture_is_a_failed_capture() -> None:
    frames = (Frame("/x/sglang/srt/cuda_graph_runner.py", 3, "capture"), Frame("/x/torch/_dynamo/a.py", 4, "compile"))
    raised = Raised(type="ValueError", message="", frames=frames)
    page = compose(evidence(Failure(chain=(raised,))), ())
    assert page.phase.failed == "capture"
    assert page.phase.layers == ("CUDA graph capture", "Dynamo")


def test_the_headline_says_that_no_later_run_failed() -> None:
    first, second = (evidence(failing("ValueError"), first_line=number) for number in (1, 20))
    good = dataclasses.replace(second, failures=())
    end = "run 1 of 2, and no later one failed"
    assert to_text(compose(first, (), other_runs=[good])).split("\n")[0].endswith(end)
    assert end not in to_text(compose(second, (), other_runs=[first]))


def test_the_progress_of_another_rank_says_nothing_of_the_one_that_failed() -> None:
    failed, begun = prefixed("[rank0]: "), "Load weight end. type=LlamaForCausalLM"
    late = prefixed("[rank1]: ", TRACEBACK.replace("ValueError", "KeyError").replace("line 30", "line 31"))

    def root_behind(said: str) -> str:
        page = page_of(f"{failed}\n{said}\n{late}")
        assert page.root is not None
        return page.root.type

    assert root_behind(f"[rank1]: {begun}") == "ValueError"
    assert root_behind(f"[rank0]: {begun}") == "KeyError"
    assert root_behind(begun) == "KeyError", "it may be of any of them"


# -- recorded runs, formats


def recorded() -> Evidence:
    raised = Raised(type="ValueError", message="bad", frames=(Frame("/srv/a.py", 3, "f", "raise ValueError('bad')"),))
    failure = Failure(
        chain=(raised,),
        count=2,
        certainty="recorded",
        processes=(Process("rank0", 0, 11), Process("rank1", 1, 12)),
        time_ns=5,
    )
    killed = Failure(chain=(), kind="killed", certainty="recorded", processes=(Process("rank2", 2, 13),))
    records = tuple(f"/out/{pid}.json" for pid in (11, 12, 13))
    return Evidence(
        sources=records, failures=(failure, killed), milestones=(Milestone("capture", "failed", "", size="bs=8"),)
    )


def test_records_are_exact() -> None:
    page = compose(recorded(), ())
    text = to_text(page)
    assert "recorded by the processes themselves" in text
    assert "cannot tell" not in text
    assert "FAILED        capture    bs=8" in text
    assert "rank0 (pid 11), rank1 (pid 12)" in text
    assert "1 x killed, by rank2 (pid 13)" in text


def test_every_format_holds_the_six_sections_and_the_cause() -> None:
    page = page_of(TRACEBACK)
    for text in (to_text(page), to_markdown(page), to_html(page)):
        places = [text.index(title) for title in ("ROOT CAUSE", "WHO", "PHASE", "STACK", "ADVICE", "ARTEFACTS")]
        assert places == sorted(places)
        assert "loss is nan" in text


def test_html_is_one_safe_file() -> None:
    html = to_html(page_of(TRACEBACK.replace("loss is nan", "<script>alert(1)</script> & more")))
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "\\u003cscript\\u003ealert" in html  # in the data


def test_the_numbers_that_matter() -> None:
    failed, distinct, known = to_report(page_of(TRACEBACK)).figures
    assert (failed.value, failed.label, failed.note, failed.tone) == ("1", "process failed", "1 traceback", "bad")
    assert (distinct.value, distinct.label, known.value) == ("1", "distinct failure", "0")
    assert to_report(page_of("all is well")).figures == ()


def test_json_names_its_schema_and_holds_the_facts() -> None:
    document = json.loads(json.dumps(to_dict(page_of(TRACEBACK))))
    assert document["schema"] == SCHEMA
    assert document["root"]["type"] == "ValueError"
    assert document["root"]["frame"] == {
        "file": "/srv/app/train.py",
        "line": 30,
        "function": "step",
        "source": 'raise ValueError("loss is nan")',
    }
    assert document["who"]["groups"][0]["count"] == 1
    assert set(document) >= {field.name for field in dataclasses.fields(Page)}


def test_control_characters_of_a_log_do_not_reach_the_terminal() -> None:
    text = to_text(page_of(TRACEBACK.replace("nan", "nan\x07\x1b]0;owned\x07 \x9b31m")))
    assert all(char.isprintable() or char == "\n" for char in text)


# -- known issues


def test_a_known_issue_of_another_line_is_not_the_reason() -> None:
    line = "train.py: error: unrecognized arguments: --lrr"
    text = to_text(compose(evidence(failing("KeyError", "'weights'"), known_issue_lines=((line, 7),))))
    assert "known issue   none of the catalogue matches" in text
    assert "elsewhere     a line of this log tells of: The command line is not one that" in text
    alone = to_text(compose(evidence(known_issue_lines=((line, 7),))))
    assert "known issue   The command line is not one that the program knows  (argument-invalid)" in alone
