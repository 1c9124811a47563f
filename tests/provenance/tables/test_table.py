"""The table of kernels: rows by place, coverage, filters, drill-down, changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.base.plan import SourceLine
from piecegraph.errors import SelectionError
from piecegraph.provenance.launch import How, KernelProfile, Launch
from piecegraph.provenance.show.text import diff_text, table_text
from piecegraph.provenance.tables.changes import diff
from piecegraph.provenance.tables.rows import Row
from piecegraph.provenance.tables.table import SORTS, Table, tabulate
from tests.cases.launches import FUSED, GEMM, GROUPS, decode_trace, launch, slower


@pytest.fixture
def table() -> Table:
    return tabulate(decode_trace(), GROUPS)


def find(table: Table, **fields: str) -> Row:
    rows = [row for row in table.rows if all(getattr(row, name) == value for name, value in fields.items())]
    assert len(rows) == 1, rows
    return rows[0]


def test_one_kernel_from_two_places_is_two_rows(table: Table) -> None:
    up = find(table, kernel=GEMM, module="model.layers.*.mlp.up_proj")
    query = find(table, kernel=GEMM, module="model.layers.*.self_attn.q_proj")
    assert (up.call, str(up.line), up.phase, up.how, up.groups) == (
        *("aten::mm", "modeling_llama.py:180", "decode 16", "position"),
        ("1",),
    )
    assert (up.total, up.num_instances, up.share) == (26, 2, 32.5)
    assert (query.total, query.num_instances, str(query.line)) == (14, 2, "modeling_llama.py:250")
    assert table.rows[0] is up


def test_one_place_in_two_phases_is_two_rows() -> None:
    launches = decode_trace().launches
    other = tuple(replace(one, phase="prefill") for one in launches)
    table = tabulate(KernelProfile(launches + other))
    assert {row.phase for row in table.rows if row.kernel == FUSED} == {"decode 16", "prefill"}


def test_statistics() -> None:
    table = tabulate(KernelProfile(tuple(launch("k", 10 * i, time) for i, time in enumerate([1.0, 2.0, 6.0]))))
    times = table.rows[0].times
    assert (times.total, times.num_instances, times.average, times.median) == (9, 3, 3, 2)
    assert (times.shortest, times.longest, times.deviation) == (1, 6, pytest.approx(7**0.5))


def test_a_fused_kernel_shows_its_main_origin_and_keeps_all(table: Table) -> None:
    fused = find(table, kernel=FUSED)
    assert (fused.shown_call, fused.module) == ("aten::silu +2", "model.layers.*.mlp.act_fn")
    assert [origin.op for origin in fused.sites[0].origins] == ["aten::silu", "aten::mul", "aten::add"]


def test_drill_down_ends_at_the_stack(table: Table) -> None:
    row = find(table, kernel=GEMM, module="model.layers.*.mlp.up_proj")
    assert [site.module for site in row.sites] == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    (instance,) = row.sites[1].instances
    assert (instance.start, instance.duration, instance.grid, instance.stream) == (40, 13, (64, 1, 4), "7")
    assert instance.call is not None
    assert instance.call.shapes == ("bfloat16[16, 64]",)
    assert [line.line for line in row.sites[1].stack] == [400, 180]


def test_coverage(table: Table) -> None:
    coverage = table.coverage
    assert (coverage.num_launches, coverage.total) == (14, 80)
    assert (coverage.with_line, coverage.with_module, coverage.unattributed) == (70, 60, 10)
    assert coverage.by_how == (("call", 10), ("position", 60), ("none", 10))
    # Two layers without a gap to 60, the add inside the second, the copy from 90 to 100.
    assert (coverage.span, coverage.busy, coverage.idle) == (100, 70, 30)


def test_a_filter_for_one_layer_takes_only_its_time(table: Table) -> None:
    part = table.filter(module="layers.1")
    assert part.total == 30
    assert {site.module.split(".")[2] for row in part.rows for site in row.sites} == {"1"}
    assert find(part, kernel=FUSED).share == 6.25
    assert part.coverage == table.coverage
    assert (table.is_whole, part.is_whole) == (True, False)


@pytest.mark.parametrize(
    ("wanted", "total"),
    [
        ({"module": "layers.*.mlp"}, 40),
        ({"module": "model.layers.0.self_attn.q_proj"}, 10),
        ({"module": "q_proj"}, 20),
        ({"op": "aten::mm"}, 50),
        ({"op": "aten.mm"}, 50),
        ({"op": "aten::mul"}, 10),
        ({"kernel": "nvjet*splitK*"}, 40),
        ({"kernel": "vectorized_elementwise_kernel[CUDAFunctor_add]"}, 10),
        ({"line": "modeling_llama.py:250"}, 20),
        ({"line": "llama/modeling_llama.py"}, 70),
        ({"line": "modeling_llama.py:405"}, 10),
        ({"module": "layers.0", "kernel": "cublasLt::*"}, 4),
    ],
)
def test_filters(table: Table, wanted: dict[str, str], total: float) -> None:
    assert table.filter(**wanted).total == total


def test_what_belongs_to_no_module(table: Table) -> None:
    assert table.filter(module="").total == 20


def test_the_kernels_of_a_line_are_also_those_below_it(table: Table) -> None:
    assert table.of(line="modeling_llama.py:400").total == 60
    assert table.of(module="self_attn").total == 20


@pytest.mark.parametrize(
    ("wanted", "code", "listed"),
    [
        ({"module": "layers.9"}, "PG712", "model.layers.*.mlp.up_proj"),
        ({"op": "aten::bmm"}, "PG712", "aten::mm"),
        ({"kernel": "flash*"}, "PG712", GEMM),
        ({"line": "modeling_llama.py:1"}, "PG712", "modeling_llama.py:180"),
        ({"line": "lama.py:180"}, "PG712", "modeling_llama.py:180"),
        ({"line": "modeling_llama.py:x"}, "PG713", "file.py:12"),
        ({"module": "self_attn", "op": "aten::silu"}, "PG712", "each matches something"),
    ],
)
def test_what_is_not_there_is_an_error_that_lists_what_is(
    table: Table, wanted: dict[str, str], code: str, listed: str
) -> None:
    with pytest.raises(SelectionError) as caught:
        table.filter(**wanted)
    assert caught.value.code == code
    assert listed in str(caught.value)


def test_long_lists_are_cut() -> None:
    launches = [launch(f"kernel_{number:02}", number, 1) for number in range(40)]
    with pytest.raises(SelectionError, match="kernel_00, .*kernel_11 and 28 more"):
        tabulate(KernelProfile(tuple(launches))).filter(kernel="none")


def test_of_takes_one_thing(table: Table) -> None:
    for wanted in ({}, {"module": "mlp", "line": "a.py"}):
        with pytest.raises(SelectionError, match="PG713"):
            table.of(**wanted)


@pytest.mark.parametrize("by", SORTS)
def test_sorts(table: Table, by: str) -> None:
    rows = table.sort(by=by).rows
    assert sorted(map(id, rows)) == sorted(map(id, table.rows))
    keys = [SORTS[by](row) for row in rows]
    assert keys == sorted(keys)  # type: ignore[type-var]


def test_sorts_begin_with_the_largest_and_with_a(table: Table) -> None:
    assert table.sort(by="avg").rows[0].kernel == GEMM
    assert table.sort(by="kernel").rows[0].kernel == "Memcpy DtoH (Device -> Pageable)"
    with pytest.raises(SelectionError, match="PG711 there is no column 'size'.*stddev"):
        table.sort(by="size")


def test_nothing_ran() -> None:
    empty = tabulate(KernelProfile(()))
    assert (empty.rows, empty.total, empty.coverage.idle, empty.is_whole) == ((), 0, 0, True)
    assert empty.filter(module="layers.0").sort(by="avg").of(line="a.py:1") == empty
    assert "nothing ran" in table_text(empty)
    assert diff(empty, empty).changes == ()
    assert "nothing ran" in diff_text(diff(empty, empty))


def test_launches_that_took_no_time() -> None:
    table = tabulate(KernelProfile((launch("k", 5, 0.0), launch("k", 5, 0.0))))
    assert (table.rows[0].share, table.coverage.span) == (0, 0)
    assert "0.0 %" in table_text(table)


def test_changes_are_sorted_by_size() -> None:
    trace = decode_trace()
    changes = diff(tabulate(trace), tabulate(slower(trace, 0.5))).changes
    assert [abs(change.delta) for change in changes] == sorted((abs(change.delta) for change in changes), reverse=True)
    assert (changes[0].kernel, changes[0].delta, changes[0].delta_instances) == (GEMM, -13, 0)
    assert {change.state for change in changes} == {"changed"}


def test_new_and_gone_rows() -> None:
    trace = decode_trace()
    without = replace(trace, launches=tuple(one for one in trace.launches if one.name != FUSED))
    (gone,) = diff(tabulate(trace), tabulate(without)).changes
    (new,) = diff(tabulate(without), tabulate(trace)).changes
    assert (gone.state, gone.delta, gone.delta_instances) == ("gone", -10, -2)
    assert (new.state, new.delta, new.row.kernel) == ("new", 10, FUSED)


def change_all(trace: KernelProfile, **fields: object) -> KernelProfile:
    return replace(trace, launches=tuple(replace(one, **fields) for one in trace.launches))  # type: ignore[arg-type]


def test_another_way_of_attributing_or_another_phase_is_no_change() -> None:
    trace = change_all(decode_trace(), phase="a")
    for other in (change_all(trace, how="node id"), change_all(trace, phase="b")):
        assert diff(tabulate(trace), tabulate(other)).changes == ()


def test_phases_that_both_have_are_kept_apart() -> None:
    one, other = change_all(decode_trace(), phase="a"), change_all(decode_trace(), phase="b")
    both = KernelProfile(one.launches + other.launches)
    after = KernelProfile(one.launches + slower(other, 2).launches)
    assert {change.row.phase for change in diff(tabulate(both), tabulate(after)).changes} == {"b"}


def test_a_row_is_found_again_when_its_line_moves_or_its_kernel_is_another_variant() -> None:
    def traced(name: str, line: int, duration: float = 5) -> Table:
        call = LaunchCall("aten::mm", (Origin("aten::mm", "mlp", (SourceLine("m.py", line),)),))
        return tabulate(KernelProfile((launch(name, 0, duration, call),)))

    assert diff(traced(GEMM, 10), traced(GEMM, 11)).changes == ()
    (change,) = diff(traced(GEMM, 10), traced("nvjet_sm90_tst_128x8_64x16_2x1_v_bz_splitK_TNT", 10, 6)).changes
    assert change.state == "changed"
    assert change.kernel == f"{GEMM} -> nvjet_sm90_tst_128x8_64x16_2x1_v_bz_splitK_TNT"
    (gone, new) = diff(traced(GEMM, 10), traced("nvjet_sm90_tst_128x8_64x16_2x1_v_bz_TNT", 10)).changes
    assert {gone.state, new.state} == {"gone", "new"}


HOWS: tuple[How, ...] = ("call", "position", "none")


@st.composite
def launches(draw: st.DrawFn) -> tuple[Launch, ...]:
    """Few names and places, so that rows hold several launches."""

    def one() -> Launch:
        module = draw(st.sampled_from(["", "layers.0.mlp", "layers.1.mlp", "head"]))
        lines = draw(st.sampled_from([(), (3,), (3, 9)]))
        origin = Origin("aten::mm", module, tuple(SourceLine("m.py", line) for line in lines))
        call = draw(st.sampled_from([None, LaunchCall("aten::mm", (origin,)), LaunchCall("aten::t", (origin, origin))]))
        return launch(
            draw(st.sampled_from([GEMM, FUSED, "k"])),
            draw(st.integers(0, 10**6)) / 8,
            draw(st.integers(1, 10**6)) / 8,
            call,
            how=draw(st.sampled_from(HOWS)),
            phase=draw(st.sampled_from(["", "decode"])),
        )

    return tuple(one() for _ in range(draw(st.integers(1, 12))))


@settings(max_examples=60, deadline=None)
@given(launches())
def test_nothing_is_lost_or_counted_twice(launched: tuple[Launch, ...]) -> None:
    table = tabulate(KernelProfile(launched))
    assert sorted(id(one) for row in table.rows for one in row.instances) == sorted(map(id, launched))
    assert table.total == pytest.approx(sum(one.duration for one in launched))
    assert sum(row.share for row in table.rows) == pytest.approx(100)
    assert sum(time for _, time in table.coverage.by_how) == pytest.approx(table.total)
    keys = [(row.kernel, row.call, row.module, row.line, row.phase, row.how) for row in table.rows]
    assert len(set(keys)) == len(keys)
    assert 0 <= table.coverage.busy <= min(table.total, table.coverage.span) + 1e-6


def below(prefix: str) -> Callable[[Origin], bool]:
    return lambda origin: origin.module.startswith(prefix)


WANTED: list[tuple[dict[str, str], Callable[[Origin], bool]]] = [
    ({"module": "layers.*"}, below("layers.")),
    ({"module": "layers.1"}, below("layers.1")),
    ({"line": "m.py:9"}, lambda origin: origin.line is not None and origin.line.line == 9),
]


@settings(max_examples=60, deadline=None)
@given(launches(), st.sampled_from(WANTED))
def test_a_filter_keeps_what_it_means_and_nothing_else(
    launched: tuple[Launch, ...], wanted: tuple[dict[str, str], Callable[[Origin], bool]]
) -> None:
    fields, means = wanted
    expected = {id(one) for one in launched if one.call and any(map(means, one.call.origins))}
    table = tabulate(KernelProfile(launched))
    if not expected:
        with pytest.raises(SelectionError, match="PG712"):
            table.filter(**fields)
        return
    part = table.filter(**fields)
    assert {id(one) for row in part.rows for one in row.instances} == expected
    assert part.filter(**fields) == part


@settings(max_examples=60, deadline=None)
@given(launches(), launches())
def test_a_diff_adds_up(one: tuple[Launch, ...], other: tuple[Launch, ...]) -> None:
    before, after = tabulate(KernelProfile(one)), tabulate(KernelProfile(other))
    assert diff(before, before).changes == ()
    changes = diff(before, after).changes
    assert sum(change.delta for change in changes) == pytest.approx(after.total - before.total)
    assert sum(change.delta_instances for change in changes) == len(other) - len(one)
