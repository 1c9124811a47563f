"""Groups mined from traces whose truth is known."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from piecegraph.base.origin import Dim3, LaunchCall, Origin, WorkKind
from piecegraph.base.plan import SourceLine
from piecegraph.provenance.groups.group import Group, Groups
from piecegraph.provenance.groups.mining import mine
from piecegraph.provenance.launch import CapturedCall, How, KernelProfile, Launch, Member
from piecegraph.provenance.show.group_wording import sentence
from piecegraph.provenance.show.json_document import groups_document
from piecegraph.provenance.show.markdown import groups_markdown
from piecegraph.provenance.show.text import groups_view

ONE: Dim3 = (8, 1, 1)
REDUCE = "cublasLt::splitKreduce_kernel<32, 16>"
CUTLASS = "cutlass::Kernel2<cutlass_80_tensorop_bf16_64x64>"
MEMSET = "Memset (Device)"


def family(name: str) -> str:
    """A stand-in: no template arguments; of nvjet only what is no tile."""
    if name.startswith("nvjet"):
        return "nvjet_splitK" if "splitK" in name else "nvjet"
    return re.sub(r"<.*", "", name)


LEVELS = (("raw", str), ("family", family))


def kind_of(name: str) -> WorkKind:
    return "memset" if name.startswith("Memset") else "memcpy" if name.startswith("Memcpy") else "kernel"


@dataclass
class Story:
    """Calls in the order in which they happened."""

    launches: list[Launch] = field(default_factory=list)
    captured: list[CapturedCall] = field(default_factory=list)
    instance: int = 0

    def call(
        self,
        op: str,
        *names: str,
        times: int = 1,
        grid: Dim3 = ONE,
        shapes: tuple[str, ...] = (),
        how: How = "call",
        module: str = "layers.0.proj",
    ) -> Story:
        for _ in range(times):
            self.instance += 1
            for name in names:
                self.launches.append(self.launch(op, name, self.instance, grid, shapes, how, module))
        return self

    def launch(
        self,
        op: str,
        name: str,
        instance: int,
        grid: Dim3 = ONE,
        shapes: tuple[str, ...] = (),
        how: How = "call",
        module: str = "",
    ) -> Launch:
        call = LaunchCall(op, (Origin(op, module, (SourceLine("/home/me/model.py", 7),)),), shapes)
        return Launch(kind_of(name), name, 0.0, 2.0, "7", grid, ONE, call, instance, "", how)

    def capture(self, op: str, *names: str, times: int = 1, grid: Dim3 = ONE) -> Story:
        members = tuple(Member(kind_of(name), "" if kind_of(name) != "kernel" else name, grid, ONE) for name in names)
        self.captured += [CapturedCall(LaunchCall(op), "8", members)] * times
        return self

    def mine(self, **rules: int) -> Groups:
        return mine(KernelProfile(tuple(self.launches), tuple(self.captured)), LEVELS, **rules)

    def only(self) -> Group:
        (group,) = self.mine().groups
        return group


def names(group: Group) -> list[str]:
    return [member.name for member in group.members]


def test_a_gemm_that_may_run_alone_is_told_apart_by_its_grid() -> None:
    story = Story().call("aten::addmm", CUTLASS, times=300)
    for _ in range(60):
        story.instance += 1
        story.launches.append(story.launch("aten::addmm", CUTLASS, story.instance, grid=(16, 4, 5)))
        story.launches.append(story.launch("aten::addmm", REDUCE, story.instance))
    group = story.only()
    assert (group.verdict, group.anchor) == ("always given", "cublasLt::splitKreduce_kernel")
    gemm, reduce = group.members
    assert (gemm.name, gemm.confidence) == ("cutlass::Kernel2", 60 / 360)
    assert reduce.is_sure
    assert gemm.condition is not None
    assert (gemm.condition.holds, gemm.condition.num_with) == ("grid.z > 1", 60)
    assert (gemm.condition.otherwise, gemm.condition.num_without) == ("grid.z = 1", 300)
    assert (group.owners[0].support, group.owners[0].calls) == (60, 360)
    assert group.bound == 3 / 60
    assert sentence(group) == (
        "`cublasLt::splitKreduce_kernel` never runs without `cutlass::Kernel2` before it, "
        "in the same `aten::addmm` call; intercept at `aten::addmm`."
    )


def test_a_grid_with_one_exception_is_no_condition() -> None:
    story = Story().call("aten::mm", CUTLASS, times=30).call("aten::mm", CUTLASS, grid=(1, 1, 2))
    story.call("aten::mm", CUTLASS, REDUCE, times=10, grid=(1, 1, 2))
    gemm = story.only().members[0]
    assert gemm.condition is None


def test_split_k_by_name_goes_both_ways_at_family_level() -> None:
    story = Story().call("aten::mm", "nvjet_64x8_TNT", times=40)
    for tile in ("64x16", "128x8", "192x8", "256x16", "64x64", "32x32"):
        story.call("aten::mm", f"nvjet_{tile}_splitK_TNT", REDUCE)
    group = story.only()
    assert (group.verdict, names(group)) == ("always", ["nvjet_splitK", "cublasLt::splitKreduce_kernel"])
    assert {member.level for member in group.members} == {"family"}


def test_two_kinds_of_gemm_before_one_reduction_stand_for_each_other() -> None:
    story = Story().call("aten::mm", CUTLASS, times=50)
    story.call("aten::mm", "nvjet_64x8_splitK", REDUCE, times=20)
    story.call("aten::addmm", CUTLASS, REDUCE, times=30, grid=(1, 1, 4))
    group = story.only()
    assert (group.verdict, group.anchor) == ("always given", "cublasLt::splitKreduce_kernel")
    assert [owner.op for owner in group.owners] == ["aten::addmm", "aten::mm"]
    assert len(group.slots) == 2
    assert {member.name for member in group.slots[0]} == {"nvjet_splitK", "cutlass::Kernel2"}
    assert not any(member.is_optional for member in group.members)
    assert " or " in sentence(group)


def test_the_two_kernels_of_a_scan() -> None:
    story = Story().call("aten::cumsum", "cub::DeviceScanInitKernel<4>", "cub::DeviceScanKernel<4>", times=6)
    group = story.only()
    assert (group.verdict, group.op, group.support) == ("always", "aten::cumsum", 6)
    assert names(group) == ["cub::DeviceScanInitKernel", "cub::DeviceScanKernel"]
    assert sentence(group).startswith(
        "`cub::DeviceScanInitKernel` and `cub::DeviceScanKernel` never run without each other, in this order"
    )


def test_attention_with_a_kernel_that_comes_only_sometimes() -> None:
    op, short, long = "sgl_kernel::fwd", ("bfloat16[8, 128]",), ("bfloat16[8, 4096]",)
    story = Story().call(op, "flash::prepare", "flash::Fwd<2>", times=20, shapes=short)
    story.call(op, "flash::prepare", "flash::Fwd<2>", "flash::Combine", times=10, shapes=long)
    group = story.only()
    assert (group.verdict, group.support) == ("always", 30)
    assert [(m.name, m.is_optional, m.calls) for m in group.members] == [
        ("flash::prepare", False, 30),
        ("flash::Fwd", False, 30),
        ("flash::Combine", True, 10),
    ]
    condition = group.members[2].condition
    assert condition is not None
    assert condition.holds == "arguments bfloat16[8, 4096]"
    assert (condition.num_with, condition.num_without) == (10, 20)


def test_attention_whose_main_kernel_is_all_that_its_calls_share() -> None:
    story = Story().call("fwd", "Fwd", times=9).call("fwd", "prepare", "Fwd", times=9)
    story.call("fwd", "Fwd", "Combine", times=8).call("fwd", "prepare", "Fwd", "Combine", times=7)
    group = story.only()
    assert (group.verdict, group.anchor) == ("always given", "prepare")
    assert [member.is_optional for member in group.members] == [True, False, True]
    assert "never runs without `Fwd` after it" in sentence(group)


def test_a_memset_is_a_member_and_never_the_anchor() -> None:
    story = Story().call("aten::mm", MEMSET, "sm90_xmma_gemm", times=12).call("aten::zero_", MEMSET, times=80)
    group = story.only()
    assert names(group) == ["Memset", "sm90_xmma_gemm"]
    assert (group.verdict, group.anchor, group.members[0].kind) == ("always given", "sm90_xmma_gemm", "memset")


@pytest.mark.parametrize("generic", [MEMSET, "elementwise_kernel<FillFunctor<float>>", "direct_copy_kernel_cuda"])
def test_nothing_follows_from_what_all_sorts_of_calls_launch(generic: str) -> None:
    # It runs only here, so by its share alone it would be an anchor.
    story = Story().call("aten::foo", generic, "work", times=10).call("aten::foo", "work", times=90)
    assert story.mine().groups == ()


def test_a_memset_joins_no_groups() -> None:
    story = Story().call("aten::mm", MEMSET, "gemm", times=8).call("aten::conv2d", MEMSET, "conv", times=9)
    assert [group.op for group in story.mine().groups] == ["aten::conv2d", "aten::mm"]


def test_a_memset_is_no_anchor_though_it_is_surer_than_the_kernel() -> None:
    group = Story().call("lib::x", MEMSET, "work", times=19).call("lib::x", "work").only()
    assert (group.verdict, group.anchor) == ("usually", "work")


def test_a_core_of_memsets_and_copies_is_given_by_the_kernels_around_it() -> None:
    copy = "direct_copy_kernel_cuda"
    story = Story().call("lib::x", MEMSET, copy, "x", times=8).call("lib::x", MEMSET, copy, "y", times=7)
    story.call("lib::x", MEMSET, copy, "x", "y")
    group = story.only()
    assert (group.verdict, group.anchor) == ("always given", "x")


def test_calls_whose_launches_interleave() -> None:
    story = Story()
    for number in range(0, 20, 2):
        for name in ("first", "second"):
            story.launches.append(story.launch("lib::a", name, number))
            story.launches.append(story.launch("lib::b", f"other_{name}", number + 1))
    groups = story.mine().groups
    assert [(group.op, names(group)) for group in groups] == [
        ("lib::a", ["first", "second"]),
        ("lib::b", ["other_first", "other_second"]),
    ]


def test_two_ops_that_launch_the_same_kernels_are_two_places_to_intercept() -> None:
    story = (
        Story().call("aten::mm", "gemm_splitK", REDUCE, times=10).call("aten::addmm", "gemm_splitK", REDUCE, times=7)
    )
    group = story.only()
    assert group.verdict == "always"
    assert [(owner.op, owner.support) for owner in group.owners] == [("aten::mm", 10), ("aten::addmm", 7)]
    assert "intercept at `aten::mm` or `aten::addmm`" in sentence(group)


def test_a_kernel_shared_with_an_op_that_launches_it_alone_does_not_imply_the_group() -> None:
    story = Story().call("lib::sort", "histogram", "sweep", times=10).call("lib::sum", "sweep", times=10)
    group = story.only()
    assert (group.verdict, group.anchor) == ("always given", "histogram")
    assert group.members[1].confidence == 0.5


def test_a_rare_companion_does_not_spoil_the_frequent_one() -> None:
    group = Story().call("lib::x", "x", "y", times=99).call("lib::x", "x", "w").only()
    assert (group.verdict, group.anchor) == ("always given", "y")


def test_usually() -> None:
    story = Story().call("lib::x", "x", "y", times=19).call("lib::x", "x").call("lib::y", "y")
    group = story.only()
    assert (group.verdict, group.bound) == ("usually", None)
    assert "95.0 % of its launches (19 of 20)" in sentence(group)
    assert Story().call("lib::x", "x", "y", times=8).call("lib::x", "x").call("lib::y", "y").mine().groups == ()


def test_finer_names_where_the_coarse_one_says_too_little() -> None:
    story = Story().call("lib::f", "gemm<split>", "reduce", times=10).call("lib::f", "gemm<plain>", times=40)
    group = story.only()
    assert group.verdict == "always"
    assert [(member.name, member.level) for member in group.members] == [("gemm<split>", "raw"), ("reduce", "family")]


def test_a_finer_name_with_an_exception_is_no_better() -> None:
    story = Story().call("lib::f", "gemm<split>", "reduce", times=10).call("lib::f", "gemm<plain>", times=40)
    group = story.call("lib::f", "gemm<split>").only()
    assert (group.verdict, names(group)) == ("always given", ["gemm", "reduce"])


def test_ops_with_nothing_in_common_but_an_optional_kernel_are_groups_of_their_own() -> None:
    story = Story().call("lib::a", "x", "y", times=9).call("lib::a", "x", "y", "cast", times=9)
    story.call("lib::b", "cast", "z", times=8)
    groups = story.mine().groups
    assert {member.level for group in groups for member in group.members} == {"family"}
    assert {group.op: (group.verdict, names(group)) for group in groups} == {
        "lib::a": ("always", ["x", "y", "cast"]),
        "lib::b": ("always given", ["cast", "z"]),
    }


def test_a_family_that_hides_the_parts_of_a_call_is_taken_apart() -> None:
    group = Story().call("lib::scan", "scan<init>", "scan<sweep>", times=6).only()
    assert (group.verdict, names(group)) == ("always", ["scan<init>", "scan<sweep>"])


def test_repeats_are_folded() -> None:
    story = Story().call("aten::sort", "histogram", "sweep", "sweep", times=6)
    story.call("aten::sort", "histogram", *["sweep"] * 4, times=6)
    assert story.only().members[1].repeats == (2, 4)
    alone = Story().call("lib::twice", "pass", "pass", times=6).only()
    assert (alone.verdict, names(alone)) == ("always", ["pass"])
    assert "always runs 2 times" in sentence(alone)


def test_fused_kernels_come_alone() -> None:
    groups = Story().call("triton_poi_fused_add_0", "triton_poi_fused_add_0", times=30).mine()
    assert groups.groups == ()
    assert groups.reason == "no call launches more than one kernel"


def test_too_few_calls_are_no_claim() -> None:
    story = Story().call("aten::cumsum", "init", "scan", times=4)
    assert story.mine().groups == ()
    assert "at least 5 calls" in story.mine().reason
    assert len(story.mine(min_support=4).groups) == 1


@pytest.mark.parametrize("how", ["node id", "position", "step", "none"])
def test_neighbours_in_a_replay_are_no_evidence(how: How) -> None:
    story = Story().call("aten::mm", "gemm", "norm", times=50, how=how)
    groups = story.mine()
    assert groups.groups == ()
    assert groups.num_calls == 0
    assert "replays alone are no evidence" in groups.reason


def test_a_replay_cannot_weaken_a_claim_either() -> None:
    story = Story().capture("aten::mm", "gemm", "reduce", times=6).call("aten::mm", "gemm", times=50, how="position")
    assert story.only().verdict == "always"


def test_a_launch_without_a_call_is_in_no_denominator() -> None:
    story = Story().call("aten::mm", "gemm", "reduce", times=6)
    story.launches.append(Launch("kernel", "reduce", 0.0, 1.0, "7", ONE, ONE, None, -1, "", "none"))
    story.launches.append(Launch("kernel", "reduce", 0.0, 1.0, "7", ONE, ONE, LaunchCall("aten::mm"), -1, "", "stack"))
    assert story.only().verdict == "always"


def test_replays_get_the_group_of_the_captured_call_and_give_their_time() -> None:
    story = Story().capture("aten::mm", MEMSET, "gemm", times=6)
    story.call("aten::mm", MEMSET, "gemm", times=3, how="node id")  # instances 1 to 3
    story.call("aten::mm", "gemm", how="node id").call("aten::bmm", MEMSET, "gemm", how="node id")
    groups = story.mine()
    assert groups.group_of_instance == {1: "G1", 2: "G1", 3: "G1"}
    assert groups.groups[0].time_us == 12.0


def test_a_replay_of_a_graph_whose_capture_was_not_seen_gets_no_group() -> None:
    story = Story().call("aten::mm", "gemm", "reduce", times=5).call("aten::mm", "gemm", "reduce", how="position")
    assert sorted(story.mine().group_of_instance) == [1, 2, 3, 4, 5]


def test_the_group_that_takes_the_most_time_is_the_first() -> None:
    story = Story().call("lib::a", "a1", "a2", times=5).call("lib::b", "b1", "b2", times=50)
    assert [(group.label, group.op) for group in story.mine().groups] == [("G1", "lib::b"), ("G2", "lib::a")]


def test_places_are_folded_over_layers() -> None:
    story = Story()
    for layer in range(6):
        story.call("aten::cumsum", "init", "scan", module=f"model.layers.{layer}.router")
    group = story.only()
    assert group.places == ("model.layers.*.router (model.py:7)",)


def test_the_same_facts_in_every_format() -> None:
    story = Story().call("aten::mm", CUTLASS, times=30).call("aten::mm", CUTLASS, REDUCE, times=10, grid=(1, 1, 3))
    groups = story.mine()
    out = io.StringIO()
    Console(file=out, width=400).print(groups_view(groups))
    assert "\x1b" not in out.getvalue()
    for text in (out.getvalue(), groups_markdown(groups)):
        assert "always given cublasLt::splitKreduce_kernel, in 10 calls of aten::mm (40 in all)" in text
        assert "with grid.z > 1: 10 of 10 launches with the group; grid.z = 1: 0 of 30." in text
        assert "fewer than 30 % are to be expected" in text
    (group,) = json.loads(json.dumps(groups_document(groups)))
    assert (group["op"], group["support"], group["verdict"]) == ("aten::mm", 10, "always given")
    assert [member["confidence"] for member in group["members"]] == [0.25, 1.0]
    assert group["members"][0]["condition"]["holds"] == "grid.z > 1"


def test_a_share_is_not_rounded_up_to_all() -> None:
    story = Story().call("lib::x", "x", "y", times=2999).call("lib::x", "x").call("lib::y", "y")
    assert "99.9 % of its launches (2999 of 3000)" in sentence(story.only())


def test_nothing_found_says_why() -> None:
    groups = Story().mine()
    out = io.StringIO()
    Console(file=out, width=200).print(groups_view(groups))
    for text in (out.getvalue(), groups_markdown(groups)):
        assert "No kernel groups: no kernel was seen. Calls looked at: 0." in text
    assert groups_document(groups) == []


Call = tuple[str, tuple[str, ...]]


def is_true(group: Group, calls: list[Call]) -> bool:
    """Whether the claim holds for every call, by looking at each."""
    rename = {"raw": str, "family": family}
    core = [slot for slot in group.slots if not slot[0].is_optional]

    def launches(call: Call, member: object) -> bool:
        return any(rename[member.level](name) == member.name for name in call[1])  # type: ignore[attr-defined]

    if group.verdict == "usually":
        return group.anchor_member.confidence >= 0.9
    implying = [m for slot in core for m in slot] if group.verdict == "always" else [group.anchor_member]
    owners = {owner.op for owner in group.owners}
    return all(
        call[0] in owners and len(call[1]) > 1 and all(any(launches(call, one) for one in slot) for slot in core)
        for member in implying
        for call in calls
        if launches(call, member)
    )


KERNELS = st.sampled_from(["a<1>", "a<2>", "b<1>", "b<2>", "c", "d", "e", MEMSET.replace(" (Device)", "")])
CALLS = st.tuples(st.sampled_from(["f", "g", "h"]), st.lists(KERNELS, min_size=1, max_size=4).map(tuple))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CALLS, st.integers(1, 12)), max_size=8))
def test_every_claim_is_true_of_every_call(counted: list[tuple[Call, int]]) -> None:
    story = Story()
    for (op, launched), times in counted:
        story.call(op, *launched, times=times)
    calls = [call for call, times in counted for _ in range(times)]
    for group in story.mine().groups:
        assert is_true(group, calls), group
        assert group.anchor_member.calls >= 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CALLS, st.integers(1, 12)), max_size=6), st.integers(2, 4), st.integers(5, 9), st.booleans())
def test_a_planted_group_is_found_and_a_counterexample_is_heeded(
    noise: list[tuple[Call, int]], size: int, times: int, with_exception: bool
) -> None:
    planted = [f"planted_{number}" for number in range(size)]
    story = Story().call("lib::planted", *planted, times=times)
    for (op, launched), repeats in noise:
        story.call(op, *launched, times=repeats)
    if with_exception:
        story.call("lib::planted", planted[0])
    group = next(group for group in story.mine().groups if group.op == "lib::planted")
    assert names(group) == planted
    assert (group.verdict, group.support) == ("always given" if with_exception else "always", times)
    assert group.members[0].is_sure == (not with_exception)
