"""Reading traces: what was launched by whom, on traces whose truth is known and on real ones of the CPU."""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from piecegraph.base.plan import SourceLine
from piecegraph.errors import InputError
from piecegraph.provenance.launch import Launch, Range, RawLaunch
from piecegraph.provenance.profile import file as profile_file
from piecegraph.provenance.profile.attribute import attribute
from piecegraph.provenance.profile.event import Decode, decode_with_json, fastest_decoder
from piecegraph.provenance.profile.file import ProfileFile
from piecegraph.provenance.profile.join import RawProfile, join
from piecegraph.provenance.profile.read import read_launches, read_profile
from piecegraph.provenance.profile.timeline import collect
from tests.cases.kernel_traces import GPU_NAME, TraceBuilder

DECODERS = {"msgspec": fastest_decoder(), "json": decode_with_json}


def read_raw(trace: TraceBuilder, folder: Path) -> RawProfile:
    return read_launches(trace.save(folder / "trace.json"))[0]


def layer(trace: TraceBuilder, number: int) -> None:
    """A linear as eager code runs it: two kernels of one op."""
    with (
        trace.python("model.py(7): forward"),
        trace.python(f"nn.Module: Linear_{number}"),
        trace.python("torch/nn/modules/module.py(1773): _call_impl"),
        trace.python("torch/nn/modules/linear.py(130): forward"),
        trace.python("<built-in function linear>"),
        trace.op("aten::linear", dims=[[2, 8], [8, 8]], types=["c10::BFloat16", "c10::BFloat16"]),
        trace.op("aten::mm", dims=[[2, 8], [8, 8], []], types=["c10::BFloat16", "c10::BFloat16", "Scalar"]),
    ):
        trace.kernel("gemm", grid=(4, 1, 5), block=(256, 1, 1))
        trace.kernel("reduce")


# ---- the join


def test_a_launch_has_the_ranges_that_were_open(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.annotation("prefill"):
        layer(trace, 3)
    gemm, reduce = read_raw(trace, tmp_path).launches
    assert [one.name for one in gemm.ranges] == [
        "aten::mm",
        "aten::linear",
        "<built-in function linear>",
        "torch/nn/modules/linear.py(130): forward",
        "torch/nn/modules/module.py(1773): _call_impl",
        "nn.Module: Linear_3",
        "model.py(7): forward",
        "prefill",
    ]
    assert gemm.ranges[0] == Range("op", "aten::mm", ("bfloat16[2, 8]", "bfloat16[8, 8]"))
    assert [one.kind for one in gemm.ranges[2:]] == ["python"] * 3 + ["module", "python", "annotation"]
    assert (gemm.kind, gemm.launcher, gemm.grid, gemm.block) == ("kernel", "cudaLaunchKernel", (4, 1, 5), (256, 1, 1))
    assert (gemm.stream, gemm.node_id, gemm.is_replayed) == ("7", None, False)
    assert gemm.ranges is reduce.ranges
    assert gemm.instance == reduce.instance >= 0


def test_calls_of_the_same_op_are_told_apart_but_share_their_ranges(tmp_path: Path) -> None:
    trace = TraceBuilder()
    layer(trace, 0)
    layer(trace, 0)
    first, _, second, _ = read_raw(trace, tmp_path).launches
    assert first.instance != second.instance
    assert first.ranges is second.ranges


def test_without_an_op_the_python_function_is_the_call(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.python("launcher.py(1): run"):
        trace.kernel("triton_a", launcher="cuLaunchKernelEx")
        trace.kernel("triton_b", launcher="cuLaunchKernelEx")
    with trace.annotation("alone"):
        trace.kernel("triton_c", launcher="cuLaunchKernelEx")
    a, b, c = read_raw(trace, tmp_path).launches
    assert a.instance == b.instance >= 0
    assert c.instance == -1


def test_threads_do_not_mix(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.op("aten::forward"):
        with trace.thread(200), trace.op("aten::backward"):
            trace.kernel("of thread 200", stream=13)
        with trace.thread(300):
            trace.kernel("of thread 300")
        trace.kernel("of thread 100")
    ranges = {launch.name: [one.name for one in launch.ranges] for launch in read_raw(trace, tmp_path).launches}
    assert ranges == {
        "of thread 100": ["aten::forward"],
        "of thread 200": ["aten::backward"],
        "of thread 300": [],
    }


def test_launches_come_in_the_order_of_their_launch(tmp_path: Path) -> None:
    trace = TraceBuilder()
    late = trace.kernel("launched first, runs last", stream=7)
    trace.kernel("launched second", stream=8)
    late["ts"] += 1000
    trace.events.reverse()
    names = [launch.name for launch in read_raw(trace, tmp_path).launches]
    assert names == ["launched first, runs last", "launched second"]


def test_a_replay_is_one_launch_of_many(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.annotation("decode"):
        trace.replay([("kernel", "a"), ("memset", "Memset"), ("memcpy", "Memcpy")])
    launches = read_raw(trace, tmp_path).launches
    assert [launch.kind for launch in launches] == ["kernel", "memset", "memcpy"]
    assert all(launch.is_replayed for launch in launches)
    assert len({launch.correlation for launch in launches}) == 1
    assert [launch.node_id for launch in launches] == [None] * 3


@pytest.mark.parametrize(
    ("graph_id", "written", "node_ids"),
    [
        (7, [7 << 32, 7 << 32 | 1], [7 << 32, 7 << 32 | 1]),
        (7, [0, 1], [7 << 32, 7 << 32 | 1]),  # by versions that write the lower half alone
        (0, [0, 0], [None, None]),
    ],
)
@pytest.mark.parametrize("decoder", DECODERS)
def test_nodes_are_named_alike_for_all_versions(
    graph_id: int, written: list[int], node_ids: list[int | None], decoder: str, tmp_path: Path
) -> None:
    trace = TraceBuilder()
    trace.replay([("kernel", "a"), ("kernel", "b")], written, graph_id)
    file = ProfileFile(str(trace.save(tmp_path / "trace.json")), DECODERS[decoder])
    assert [launch.node_id for launch in join(collect(file.batches())).launches] == node_ids


def test_the_runtime_is_the_launcher_where_the_driver_was_called_too(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.op("aten::mm"):
        correlation = trace.call("cuLaunchKernelEx", category="cuda_driver")
        trace.call("cudaLaunchKernelExC", correlation=correlation)
        trace.work("kernel", "gemm", correlation)
        trace.call("cudaStreamSynchronize")
    (launch,) = read_raw(trace, tmp_path).launches
    assert launch.launcher == "cudaLaunchKernelExC"
    assert launch.ranges[0].name == "aten::mm"


def test_a_launch_outside_of_the_trace_is_found_by_its_external_id_or_not_at_all(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.kernel("unknown", launcher="")
    with trace.python("model.py(7): forward"), trace.op("aten::mm"):
        with trace.op("aten::empty"):
            pass
        trace.kernel("of mm", launcher="")
    by_name = {launch.name: launch for launch in read_raw(trace, tmp_path).launches}
    assert by_name["unknown"].ranges == ()
    assert (by_name["unknown"].launcher, by_name["unknown"].instance) == ("", -1)
    assert [one.name for one in by_name["of mm"].ranges] == ["aten::mm", "model.py(7): forward"]
    assert by_name["of mm"].instance >= 0
    assert by_name["of mm"].launcher == ""


def test_processes_that_use_the_same_numbers_are_not_mixed_up(tmp_path: Path) -> None:
    merged = TraceBuilder()
    for pid in (100, 200):
        one = TraceBuilder(pid=pid, tid=pid)
        with one.op(f"aten::of_{pid}"):
            one.kernel("gemm")
        merged.events += one.events
    trace = read_profile(merged.save(tmp_path / "trace.json"))
    assert [launch.how for launch in trace.launches] == ["none", "none"]
    assert "2 of 2 cannot be attributed: several processes were merged into this trace" in trace.notes


def test_streams_of_several_devices_are_told_apart(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.kernel("a", device=0)
    trace.kernel("b", device=1)
    assert [launch.stream for launch in read_raw(trace, tmp_path).launches] == ["0:7", "1:7"]
    assert read_profile(tmp_path / "trace.json").device == GPU_NAME


def test_addresses_of_objects_make_no_new_names(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for address in ("0xffff99c0cc98", "0xffff7e8a1c10"):
        with trace.python(f"<built-in method relu of type object at {address}>"):
            trace.kernel("relu")
    first, second = read_raw(trace, tmp_path).launches
    assert first.ranges is second.ranges
    assert first.ranges[0].name == "<built-in method relu of type>"


# ---- the attribution


def test_a_call_is_its_op_with_module_lines_and_phase(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.annotation("prefill"), trace.annotation("ProfilerStep#12"), trace.annotation("piecegraph.piece"):
        layer(trace, 3)
    read = read_profile(trace.save(tmp_path / "trace.json"))
    launch = read.launches[0]
    assert launch.call is not None
    assert (launch.call.op, launch.call.shapes) == ("aten::mm", ("bfloat16[2, 8]", "bfloat16[8, 8]"))
    (origin,) = launch.call.origins
    assert (origin.op, origin.module, origin.stack) == ("aten::mm", "Linear_3", (SourceLine("model.py", 7),))
    assert (launch.phase, launch.how, read.device) == ("prefill", "stack", GPU_NAME)
    assert launch.call is read.launches[1].call
    assert read.notes == ("lines that were found by stack are where a function begins: the profiler tells no others",)


@pytest.mark.parametrize(
    ("frames", "lines"),
    [
        (["a.py(1): f", "/x/site-packages/torch/nn/functional.py(2): g", "b.py(3): h"], [("a.py", 1), ("b.py", 3)]),
        (["torch/a.py(1): f", "/x/torch/b.py(2): g", "<built-in function linear>"], [("/x/torch/b.py", 2)]),
        (["<string>(1): __init__", "piecegraph/tape.py(3): replay", "m (v2).py(4): f"], [("m (v2).py", 4)]),
        (["<built-in function linear>"], []),
    ],
)
def test_torch_is_left_out_of_the_stack(frames: list[str], lines: list[tuple[str, int]], tmp_path: Path) -> None:
    trace = TraceBuilder()
    outer, *inner = frames
    with trace.python(outer), trace.python((inner or ["<built-in a>"])[0]), trace.python((inner or ["<b>"])[-1]):
        trace.kernel("k")
    (launch,) = read_profile(trace.save(tmp_path / "trace.json")).launches
    assert launch.call is not None
    assert launch.call.origins[0].stack == tuple(SourceLine(*line) for line in lines)


def test_what_a_graph_runs_is_not_attributed_to_its_replay(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.python("serve.py(7): step"):
        trace.replay([("kernel", "a"), ("kernel", "b")])
        with trace.annotation("decode bs=8"):
            trace.replay([("kernel", "a"), ("kernel", "b")])
    read = read_profile(trace.save(tmp_path / "trace.json"))
    assert [(launch.how, launch.phase) for launch in read.launches] == [("none", "")] * 2 + [
        ("step", "decode bs=8")
    ] * 2
    assert all(launch.call is None and launch.instance == -1 for launch in read.launches)
    first, second, third, fourth = (launch.replay for launch in read.launches)
    assert first == second != third == fourth
    assert any(note.startswith("4 of 4 ran in 2 replays of graphs") for note in read.notes)


def test_notes_say_what_is_missing(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.kernel("before", launcher="")
    with trace.op("aten::mm"):
        trace.kernel("gemm")
    assert read_profile(trace.save(tmp_path / "trace.json")).notes == (
        "1 of 2 were launched outside of the time that was recorded: by whom is not known",
        "there are no lines of Python: record with with_stack=True",
    )


def test_another_attribution_is_asked_first(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.replay([("kernel", "a"), ("kernel", "b")], node_ids=[1, 2], graph_id=3)

    def by_node(raw: RawLaunch) -> Launch | None:
        return raw.made_by(None, 5, "8", "node id") if raw.node_id == 3 << 32 | 1 else None

    read = attribute(*read_launches(trace.save(tmp_path / "trace.json")), by_node)
    assert [(launch.how, launch.instance) for launch in read.launches] == [("node id", 5), ("none", -1)]


# ---- traces without a GPU


def test_on_a_cpu_ops_are_listed_with_their_own_time(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.python("model.py(7): forward"), trace.op("aten::linear"):  # 2 + 2 of its own
        with trace.op("aten::t"):  # 2
            pass
        with trace.op("aten::mm"):  # 2 + 2 + 2
            with trace.op("aten::empty") as empty:
                pass
            with trace.op("aten::copy_"):
                pass
    empty["dur"] = 0.0
    read = read_launches(trace.save(tmp_path / "trace.json"))[0]
    assert {launch.name: launch.duration for launch in read.launches} == {
        "aten::linear": 6.0,
        "aten::t": 2.0,
        "aten::mm": 8.0,
        "aten::copy_": 2.0,
    }
    ranges = {launch.name: [one.name for one in launch.ranges] for launch in read.launches}
    assert ranges["aten::copy_"] == ["aten::copy_", "aten::mm", "aten::linear", "model.py(7): forward"]
    assert ranges["aten::linear"] == ["aten::linear", "model.py(7): forward"]
    assert all(launch.kind == "op" and launch.launcher == "" for launch in read.launches)
    assert read_profile(tmp_path / "trace.json").device == "cpu"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


FORWARD_LINE = Block.forward.__code__.co_firstlineno


def profiled_block() -> tuple[profile, dict[str, float]]:
    """A profile, and the time of each op. torch keeps the names of frames by address, and what one belongs to may be
    gone when it is asked for: then there is no reading the profile, and another is made.
    """
    block, x = Block(), torch.randn(2, 8)
    for _ in range(5):
        with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as recorded:
            with record_function("a step"), torch.no_grad():
                block(x)
        with contextlib.suppress(UnicodeDecodeError):
            return recorded, {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    raise AssertionError("no profile can be read")


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_real_trace_of_the_cpu(suffix: str, tmp_path: Path) -> None:
    recorded, totals = profiled_block()
    path = str(tmp_path / f"trace{suffix}")
    recorded.export_chrome_trace(path)
    read = read_profile(path)
    products = [launch for launch in read.launches if launch.name == "aten::addmm"]
    assert [launch.call.shapes for launch in products if launch.call is not None] == [
        ("float32[16]", "float32[2, 8]", "float32[8, 16]"),
        ("float32[8]", "float32[2, 16]", "float32[16, 8]"),
    ]
    origins = [launch.call.origins[0] for launch in products if launch.call is not None]
    assert all(origin.module.startswith("Linear_") for origin in origins)
    assert len({origin.module for origin in origins}) == 2
    for origin in origins:
        assert origin.line is not None
        assert str(origin.line) == f"{Path(__file__).name}:{FORWARD_LINE}"
    assert {launch.phase for launch in products} == {"a step"}
    assert len({launch.instance for launch in read.launches}) == len(read.launches)
    assert sum(launch.duration for launch in products) == pytest.approx(totals["aten::addmm"], rel=0.01)


# ---- forms of files


def some_events(number: int) -> list[dict[str, Any]]:
    """With what makes cutting hard: braces in names, and lists of objects in events."""
    return [
        {"ph": "X", "cat": "cpu_op", "name": f'op "{index}" }}, {{ é', "ts": index, "dur": 1,
         "args": {"External id": index, "nested": [{"a": "}"}, {"b": {}}, {}], "Input Dims": [[index, 2]]}}
        for index in range(number)
    ]  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("block", [1, 7, 300, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_every_event_is_read_however_blocks_fall(
    decoder: str, block: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_file, "BLOCK_BYTES", block)
    events = some_events(9 if block < 300 else 400)
    path = tmp_path / "trace.json"
    document = {"big": 12345678, "before": [{"x": 1}, {}], "traceEvents": events, "deviceProperties": [{"id": 0}, {}]}
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=False), encoding="utf-8")
    file = ProfileFile(str(path), DECODERS[decoder])
    read = [event for batch in file.batches() for event in batch]
    assert [event.name for event in read] == [event["name"] for event in events]
    assert [event.args.external_id for event in read] == list(range(len(events)))
    assert [json.loads(bytes(event.args.dims)) for event in read[:3]] == [[[0, 2]], [[1, 2]], [[2, 2]]]
    assert file.device_properties == [{"id": 0}, {}]
    assert file.num_events == len(events)


def test_a_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    trace = TraceBuilder()
    layer(trace, 0)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace.events))
    listed = read_profile(path)
    assert [launch.name for launch in listed.launches] == ["gemm", "reduce"]
    assert listed.device == ""


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    trace = TraceBuilder()
    layer(trace, 0)
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    assert read_profile(trace.save(plain)) == read_profile(trace.save(packed))
    assert read_profile(packed.rename(tmp_path / "no suffix")) == read_profile(plain)


@pytest.mark.parametrize("decoder", DECODERS)
def test_odd_values_are_no_reason_to_fail(decoder: str, tmp_path: Path) -> None:
    odd = [
        {"ph": "X", "cat": "cpu_op", "name": "a\nb", "ts": "12.5", "dur": 3, "pid": [1], "tid": None, "args": None},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "k",
            "ts": float("nan"),
            "dur": float("inf"),
            "args": {"correlation": 2**80},
        },
        {"ph": "X", "cat": "kernel", "name": "k", "args": {"correlation": "5", "grid": "none", "block": [1, 2]}},
        {"ph": "X", "cat": "cpu_op", "name": "c", "args": {"Input Dims": "?", "Input type": ["float"]}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([*odd, *some_events(3)]).replace("\\n", "\n"))
    read = [event for batch in ProfileFile(str(path), DECODERS[decoder]).batches() for event in batch]
    assert [event.name for event in read[:4]] == ["a\nb", "k", "k", "c"]
    assert (read[0].ts, read[0].dur, read[1].ts, read[1].dur) == (12.5, 3.0, 0.0, 0.0)
    assert [event.args.correlation for event in read[:3]] == [-1, -1, 5]
    assert {launch.kind for launch in read_launches(path)[0].launches} == {"kernel"}


def test_a_name_that_is_no_text_is_kept_as_far_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b'\xef\xbb\xbf[{"ph": "X", "cat": "cpu_op", "name": "a\xffb", "ts": 1, "dur": 1}]')
    assert [launch.name for launch in read_launches(path)[0].launches] == ["a\ufffdb"]


def test_it_works_without_msgspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceBuilder()
    layer(trace, 0)
    path = trace.save(tmp_path / "trace.json")
    expected = read_profile(path)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    decode: Decode = fastest_decoder()
    assert decode is decode_with_json
    assert read_profile(path) == expected


# ---- errors


def error_of(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_profile(path)
    assert str(path) in caught.value.where
    assert caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("content", "code", "why"),
    [
        (b"", "PG702", ""),
        (b" \n ", "PG702", ""),
        (gzip.compress(b"", mtime=0), "PG702", ""),
        (b"hello", "PG703", "it should begin with { or ["),
        (b"\x00\x01\x02", "PG703", "it should begin with { or ["),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "PG703", "']' was expected"),
        (b'{"traceEvents": [{"ph": X, "a": 1}]}', "PG703", "Expecting value"),
        (b'[{"ph": "M"}, 7, {"ph": "M"}, {"ph": "M"}]', "PG703", "an event was expected"),
        (b'{"a": 1, }', "PG703", "a name was expected"),
        (b'{"traceEvents": [{}, ]}', "PG703", "an event was expected"),
        (b'{"traceEvents": [{}]} {"traceEvents": []}', "PG703", "there is more behind the end of its JSON"),
        (b"[" * 100_000, "PG703", "an event was expected"),
        (b'{"a": 1}', "PG704", "it is JSON, but has no list of traceEvents, or an empty one"),
        (b'{"traceEvents": []}', "PG704", "it is JSON, but has no list of traceEvents, or an empty one"),
        (b'{"traceEvents": {"a": 1}}', "PG704", "it is JSON, but has no list of traceEvents, or an empty one"),
        (b"[]", "PG704", "it is JSON, but has no list of traceEvents, or an empty one"),
        (b'[{"ph": "M"}, {"ph": "i"}]', "PG704", "none of its 2 events is one"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "M"}, {"ph"', "PG705", "the file ends there, after 2 whole events"),
        (gzip.compress(b"[{}]" * 100, mtime=0)[:-9], "PG705", "the file ends there, after 0 whole events"),
        (gzip.compress(b"[{}]", mtime=0)[:-8] + b"12345678", "PG706", "CRC check failed"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(content: bytes, code: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    error = error_of(path)
    assert (error.code, error.why[: len(why)]) == (code, why)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_trace_that_ends_anywhere_is_refused(decoder: str, tmp_path: Path) -> None:
    whole = json.dumps({"a": [1.5, True], "traceEvents": some_events(1), "traceName": "x"}, ensure_ascii=False).encode()
    path = tmp_path / "trace.json"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError) as caught:
            list(ProfileFile(str(path), DECODERS[decoder]).batches())
        assert caught.value.code == "PG705", whole[:length]


def test_the_place_where_a_trace_ends_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "BLOCK_BYTES", 1 << 12)
    path = tmp_path / "trace.json"
    whole = json.dumps(some_events(1500), ensure_ascii=False).encode()
    path.write_bytes(whole[:-30])
    error = error_of(path)
    assert error.where == f"byte {len(whole) - 30:,} of {path}"
    assert error.why == "the file ends there, after 1,499 whole events"


def test_the_place_of_damage_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "BLOCK_BYTES", 1 << 12)
    path = tmp_path / "trace.json"
    whole = json.dumps(some_events(900), ensure_ascii=False).encode()
    place = whole.index(b'{"ph": "X", "cat": "cpu_op", "name": "op \\"600')
    path.write_bytes(whole[: place + 1] + b"?" + whole[place + 1 :])
    error = error_of(path)
    assert (error.code, error.where) == ("PG703", f"byte {place + 1:,} of {path}")


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    assert error_of(tmp_path / "missing.json").why == "No such file or directory"
    assert error_of(tmp_path).why == "Is a directory"
    assert error_of(tmp_path).code == "PG701"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(profile_file, "open", refuse, raising=False)  # root may read everything
    assert error_of(tmp_path / "trace.json").why == "Permission denied"


def test_a_broken_file_is_not_searched_with_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(profile_file, "MAX_VALUE_CHARS", 1 << 12)
    path = tmp_path / "trace.json"
    path.write_text('[{"name": "never ends' + "x" * (1 << 20))
    file = ProfileFile(str(path))
    with pytest.raises(InputError) as caught:
        list(file.batches())
    assert caught.value.code == "PG703"
    assert file._text.num_bytes_seen() < 1 << 14


def test_long_files_show_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from piecegraph.provenance.profile import read

    path = tmp_path / "trace.json"
    path.write_text(json.dumps(some_events(20)))
    monkeypatch.setattr(read, "_MEGABYTE", 100)
    read_profile(path, progress=True)
    assert capsys.readouterr().err == "", "a short file needs none"
    monkeypatch.setattr(read, "_LONG_FILE_BYTES", 100)
    read_profile(path, progress=True)
    assert "reading" in capsys.readouterr().err
