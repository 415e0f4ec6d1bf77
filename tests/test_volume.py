"""What a step should send, by hand: padding, every strategy's formula, and counts that are off by a little."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from scaling.config import (
    BatchConfig,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    SingleConfig,
    StrategyConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
    Zero3Config,
)
from scaling.engine import Engine
from scaling.measure.collectives import Collective, StepCount
from scaling.measure.layout import Layout, Weight
from scaling.measure.volume import Volume, expected_volume
from scaling.workload import Workload

# 12 elements in 4 rows, and 5, in a block; a tied one of 6 in 3 rows outside: 23 elements.
BIG, ODD, TIED = Weight(12, 4, 1, 0), Weight(5, 5, 1, 0), Weight(6, 3, 2, None)
LAYOUT = Layout([BIG, ODD, TIED])
EVEN = Layout([Weight(8, 4, 1, 0), Weight(16, 4, 1, 0)])  # all in blocks; divides by whatever is tried here
FREES_ALL = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
KEEPS = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
TWICE = "DeepSpeed all-reduces its buckets, where the textbook scatters: twice the bytes"
PADDED = "shards are padded to equal first dimensions"
ONCE = "coalesce_grad_reduction: reduced once per step"
ROOT = "what lies outside the blocks stays gathered from forward to backward"


def volume(
    strategy: StrategyConfig,
    ranks: int = 2,
    accumulation: int = 1,
    *,
    layout: Layout = LAYOUT,
    zero: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    gather: torch.dtype | None = None,
    reduce: torch.dtype | None = torch.float32,
    checkpointing: bool = False,
    mixed: bool = False,
) -> Volume:
    batch = BatchConfig(1, accumulation, accumulation * ranks)
    config = TrainConfig(strategy=strategy, batch=batch, checkpointing=checkpointing)
    given = None if zero is None else {"zero_optimization": zero} | (settings or {})
    engine = SimpleNamespace(reduce_dtype=reduce, gather_dtype=gather, settings=given, mixed_types=mixed)
    return expected_volume(config, cast(Engine, engine), layout, ranks)


def zero3(accumulation: int = 1, threshold: int = 0, strategy: Zero3Config | None = None, **options: Any) -> Volume:
    """ZeRO-3 that frees everything at once, unless `options` has another `zero`."""
    zero = options.pop("zero", FREES_ALL) | {"stage": 3, "stage3_param_persistence_threshold": threshold}
    options = {"gather": torch.float32} | options
    return volume(strategy or Zero3Config(), accumulation=accumulation, zero=zero, **options)


# Layout


@pytest.mark.parametrize(
    ("weight", "ranks", "flat", "rows"),
    [
        (BIG, 2, 12, 12),
        (BIG, 3, 12, 18),  # 6 rows of 3
        (ODD, 2, 6, 6),
        (ODD, 4, 8, 8),
        (TIED, 2, 6, 8),  # 4 rows of 2, where flat 6 elements divide
        (TIED, 4, 8, 8),
        (Weight(10, 1, 1, None), 4, 12, 40),  # one row: all ranks but one have nothing
        (Weight(1, 1, 1, None), 1, 1, 1),
    ],
)
def test_zero_pads_flat_weights_and_fsdp_their_rows(weight: Weight, ranks: int, flat: int, rows: int) -> None:
    assert weight.padded(ranks) == flat
    assert weight.padded_rows(ranks) == rows


class Block(nn.Module):
    """A layer that holds another of its kind."""

    def __init__(self, inner: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.inner = Block(inner=False) if inner else nn.Identity()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([Block(), Block(inner=False)])
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(9, 2), requires_grad=False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def layout_of(module: nn.Module) -> Layout:
    return Layout.of(Workload(module, lambda m, t: (torch.zeros(()), 1), lambda n, g: {}, (Block,)))


def test_the_layout_counts_a_tied_weight_once_and_knows_its_owners_and_the_outermost_blocks() -> None:
    layout = layout_of(Model())
    linear = [(15, 5, 1), (5, 5, 1)]
    assert [(w.elements, w.first, w.owners, w.block) for w in layout.weights] == [
        (1, 1, 1, None),  # the scalar
        (18, 9, 1, None),  # the frozen one
        (21, 7, 2, None),  # embedding and head
        *[(*sizes, 0) for sizes in linear * 2],  # with the block inside the block
        *[(*sizes, 1) for sizes in linear],
    ]
    assert all(w.uses == w.owners for w in layout.weights), "no module has two places"


def test_the_layout_tells_what_is_trained_from_what_is_frozen() -> None:
    layout = layout_of(Model())
    assert [w.trained for w in layout.weights] == [True, False, *[True] * 7]
    assert layout.trained == [w for w in layout.weights if w.elements != 18]
    assert layout.elements == 1 + 21 + 3 * 20
    assert layout.all_elements == layout.elements + 18


class Twice(nn.Module):
    """One block in two places, and a tied pair of which each has one."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block(inner=False)
        self.blocks = nn.ModuleList([shared, Block(inner=False), shared])
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_a_module_in_two_places_owns_its_parameters_once_and_uses_them_twice() -> None:
    layout = layout_of(Twice())
    assert [(w.elements, w.owners, w.uses, w.block) for w in layout.weights] == [
        (15, 1, 2, 0),  # one block, although it stands first and last
        (5, 1, 2, 0),
        (15, 1, 1, 1),
        (5, 1, 1, 1),
        (21, 2, 2, None),
    ]


# Each strategy


def test_alone_nothing_is_sent() -> None:
    assert volume(SingleConfig(), 1) == Volume(0, {}, textbook=0.0, elements=23)
    assert volume(DDPConfig(), 1) == Volume(None, {}, textbook=0.0, elements=23)
    assert zero3(ranks=1) == Volume(None, {}, textbook=0.0, elements=23)


@pytest.mark.parametrize("strategy", [DDPConfig(), Zero0Config()])
@pytest.mark.parametrize(
    ("ranks", "reduce", "sent"),
    [
        (2, torch.float32, 92.0),  # 23 x 4
        (4, torch.float32, 138.0),  # x 2 x 3/4
        (4, torch.bfloat16, 69.0),
        (2, None, 92.0),
    ],
)
def test_replicas_reduce_once_whatever_the_accumulation(
    strategy: StrategyConfig, ranks: int, reduce: torch.dtype | None, sent: float
) -> None:
    zero: dict[str, Any] | None = {} if isinstance(strategy, Zero0Config) else None
    expected = Volume(1, {"all_reduce": sent}, textbook=sent, elements=23)
    for accumulation in (1, 4):
        assert volume(strategy, ranks, accumulation, zero=zero, reduce=reduce) == expected


@pytest.mark.parametrize(
    ("strategy", "accumulation", "syncs", "sent", "notes"),
    [
        # blocks 12 + 6 twice and 8 outside once; 26 scattered; 4 bytes x 1/2
        (FSDPConfig(), 1, 1, (88.0, 52.0), [ROOT, PADDED]),
        (FSDPConfig(), 3, 3, (264.0, 156.0), [ROOT, PADDED]),
        (
            FSDPConfig(reshard=False),
            3,
            3,
            (156.0, 156.0),
            ["reshard=false: weights stay gathered from forward to backward", PADDED],
        ),
        (
            FSDPConfig(coalesce_grad_reduction=True),
            3,
            1,
            (264.0, 52.0),
            [ROOT, ONCE, PADDED],
        ),
    ],
)
def test_fsdp_gathers_blocks_twice_and_the_rest_once(
    strategy: FSDPConfig, accumulation: int, syncs: int, sent: tuple[float, float], notes: list[str]
) -> None:
    found = volume(strategy, 2, accumulation, gather=torch.float32)
    assert (found.syncs, found.bytes) == (syncs, dict(zip(("all_gather", "reduce_scatter"), sent, strict=True)))
    assert found.textbook == accumulation * 138.0  # 23 elements, twice gathered and once scattered
    assert found.notes == notes
    assert found.most == {}


def test_fsdp_of_even_blocks_alone_is_the_textbook() -> None:
    found = volume(FSDPConfig(), 4, 2, layout=EVEN, gather=torch.bfloat16)
    # 2 x 24 x 2 bytes gathered, 24 x 4 scattered; x 3/4, twice
    assert found == Volume(2, {"all_gather": 144.0, "reduce_scatter": 144.0}, textbook=288.0, elements=24)


def test_fsdp_of_odd_rows_on_four_ranks_sends_its_padding() -> None:
    found = volume(FSDPConfig(), 4, gather=torch.float32)  # 12 + 8 in the block, 8 outside
    assert found.bytes == {"all_gather": (2 * 20 + 8) * 4 * 0.75, "reduce_scatter": 28 * 4 * 0.75}


@pytest.mark.parametrize(
    ("strategy", "accumulation", "syncs", "reduced", "textbook"),
    [
        (Zero1Config(), 1, 1, 92.0, 92.0),  # 23 x 4; the textbook scatters and gathers: 23 x 8 / 2
        (Zero1Config(), 4, 1, 92.0, 92.0),
        (Zero2Config(), 1, 1, 92.0, 92.0),
        (Zero2Config(), 4, 4, 368.0, 230.0),  # 23 x (4 x 4 + 4) / 2
        (Zero2Config(coalesce_grad_reduction=True), 4, 1, 92.0, 230.0),
        (DeepSpeedConfig(), 4, 4, 368.0, 230.0),
    ],
)
def test_zero_1_reduces_once_and_zero_2_after_every_backward(  # C16
    strategy: StrategyConfig, accumulation: int, syncs: int, reduced: float, textbook: float
) -> None:
    stage = 1 if type(strategy) is Zero1Config else 2
    found = volume(strategy, 2, accumulation, zero={"stage": stage}, gather=torch.float32)
    assert (found.syncs, found.textbook) == (syncs, textbook)
    assert found.bytes == {"all_reduce": reduced, "all_gather": 48.0}  # 24 x 4 / 2
    coalesces = getattr(strategy, "coalesce_grad_reduction", False)
    assert found.notes == [TWICE, *[ONCE] * coalesces, "weights are padded to a multiple of 4 elements"]


def test_zero_1_and_2_pad_to_twice_the_ranks_and_gather_in_the_type_of_the_weights() -> None:
    found = volume(Zero2Config(), 4, zero={"stage": 2}, gather=torch.bfloat16)
    assert found.bytes == {"all_reduce": 138.0, "all_gather": 24 * 2 * 0.75}
    assert found.notes[1] == "weights are padded to a multiple of 8 elements"
    assert volume(Zero1Config(), 4, layout=EVEN, zero={"stage": 1}, gather=torch.float32).notes == [TWICE]


TIED_NOTE = "a tied weight is gathered for each module that owns it"
AGAIN_NOTE = "checkpointing runs forward again in backward, and may gather again for it"


def reuse(megabytes: str) -> str:
    return f"weights used again within max_reuse_distance stay gathered: all_gather up to {megabytes} MB"


def kept(found: Volume, count: int, threshold: int) -> str:
    """The note that says how many parameters stay gathered."""
    note = found.notes[0]
    assert re.fullmatch(
        f"{count} parameters .*{threshold} elements stay gathered, and are gathered once per step", note
    )
    return note


def test_zero_3_that_frees_everything_gathers_for_forward_and_backward_and_each_owner() -> None:
    for accumulation in (1, 3):
        found = zero3(accumulation)
        # 12 and 6 twice, the tied 6 four times; x 4 bytes / 2; 24 scattered
        assert found.bytes == {"all_gather": accumulation * 120.0, "reduce_scatter": accumulation * 48.0}
        assert found.most == {"all_gather": accumulation * 120.0}
        assert (found.syncs, found.textbook) == (accumulation, accumulation * 138.0)
        assert found.notes == [TIED_NOTE]


def test_zero_3_of_even_weights_that_frees_everything_is_the_textbook() -> None:
    found = zero3(2, layout=EVEN, ranks=4, gather=torch.bfloat16)
    assert found.bytes == {"all_gather": 144.0, "reduce_scatter": 144.0}
    assert (found.textbook, found.notes) == (288.0, [])


def test_parameters_of_up_to_the_threshold_are_gathered_once_per_step() -> None:
    found = zero3(2, threshold=5)  # DeepSpeed keeps those of 5 elements, and 6 are more
    # 6 once, and in both micro-steps 12 twice and the tied 6 four times
    assert found.bytes == {"all_gather": (6 + 2 * 48) * 2.0, "reduce_scatter": 96.0}
    assert found.notes == [kept(found, 1, 5), TIED_NOTE]


def test_deepspeeds_thresholds_leave_a_range_from_once_to_every_time() -> None:
    found = zero3(2, threshold=5, zero=KEEPS)
    assert found.bytes == {"all_gather": (6 + 2 * 18) * 2.0, "reduce_scatter": 96.0}
    assert found.most == {"all_gather": (6 + 2 * 48) * 2.0}
    assert found.notes == [kept(found, 1, 5), reuse("0.000204")]
    one = zero3(zero=KEEPS | {"stage3_max_live_parameters": 0})  # both have to be 0
    assert one.most == {"all_gather": 120.0} and one.notes == [reuse("0.00012")]


def test_zero_3_that_keeps_all_gathers_once_whatever_the_accumulation() -> None:
    for accumulation in (1, 4):
        for checkpointing in (False, True):
            found = zero3(accumulation, threshold=100_000, zero=KEEPS, checkpointing=checkpointing)
            assert found.bytes == {"all_gather": 48.0, "reduce_scatter": accumulation * 48.0}
            assert found.most == {"all_gather": 48.0}
            assert found.notes == [kept(found, 3, 100_000)]


def test_checkpointing_may_gather_the_blocks_again() -> None:
    found = zero3(2, checkpointing=True)
    assert found.bytes == {"all_gather": 240.0, "reduce_scatter": 96.0}
    assert found.most == {"all_gather": 240.0 + 2 * 18 * 2.0}
    assert found.notes == [TIED_NOTE, AGAIN_NOTE]


def test_zero_3_coalesced_scatters_once_and_gathers_as_ever() -> None:
    found = zero3(4, strategy=Zero3Config(coalesce_grad_reduction=True))
    assert found.bytes == {"all_gather": 480.0, "reduce_scatter": 48.0}
    assert (found.syncs, found.textbook) == (1, 552.0)
    assert found.notes == [TIED_NOTE, ONCE]


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_a_users_file_that_quantizes_is_not_computed(key: str) -> None:
    found = volume(DeepSpeedConfig(), zero={"stage": 3, key: True}, gather=torch.float32)
    assert found == Volume(None, None, notes=[f"not computed for {key}"], elements=23)
    assert found.holds(count({"all_to_all": 9}))
    off = {"stage": 2, key: False}
    assert volume(DeepSpeedConfig(), zero=off, gather=torch.float32).bytes is not None


def test_several_such_keys_are_all_named() -> None:
    both = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}
    assert volume(DeepSpeedConfig(), zero=both).notes == [
        "not computed for zero_quantized_weights, zero_hpz_partition_size"
    ]


@pytest.mark.parametrize(("key", "value"), [("allgather_partitions", True), ("zero_hpz_partition_size", 1)])
def test_deepspeeds_own_default_written_out_is_computed(key: str, value: object) -> None:
    """Both stand in many public files, and mean what leaving them out does."""
    plain = volume(DeepSpeedConfig(), zero={"stage": 2}, gather=torch.float32)
    assert volume(DeepSpeedConfig(), zero={"stage": 2, key: value}, gather=torch.float32) == plain


def test_a_users_file_that_reduces_to_each_owner_is_no_surprise() -> None:
    zero = {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    found = volume(DeepSpeedConfig(), zero=zero, gather=torch.float32)
    assert found.holds(count({"reduce": 92, "all_gather": 96}))


@pytest.mark.parametrize("strategy", [Zero1Config(), Zero3Config(), DeepSpeedConfig()])
def test_layers_that_reduce_in_another_type_than_others_are_not_computed(strategy: StrategyConfig) -> None:
    stage = 3 if isinstance(strategy, Zero3Config) else 1
    found = volume(strategy, zero={"stage": stage}, gather=torch.float32, reduce=torch.bfloat16, mixed=True)
    assert (found.syncs, found.bytes, found.textbook, found.elements) == (None, None, None, 23)
    (note,) = found.notes
    assert note.startswith("not computed: torch_autocast")
    assert found.holds(count({"all_reduce": 12345}))


# Frozen parameters, shared modules, padded buffers

# 12 elements that train; 10 in 5 rows in the block, and 6 in 3 rows outside, that do not.
FROZEN = Layout([BIG, Weight(10, 5, 1, 0, trained=False), Weight(6, 3, 1, None, trained=False)])


@pytest.mark.parametrize(
    ("strategy", "stage", "sent", "textbook"),
    [
        (DDPConfig(), None, {"all_reduce": 48.0}, 48.0),  # 12 x 4
        (Zero0Config(), 0, {"all_reduce": 48.0}, 48.0),
        (Zero1Config(), 1, {"all_reduce": 48.0, "all_gather": 24.0}, 48.0),
        (Zero2Config(), 2, {"all_reduce": 48.0, "all_gather": 24.0}, 48.0),
        # the block's 12 + 6 rows of 2 twice, and 4 rows of 2 outside once; the textbook 2 x 28 gathered, 12 scattered
        (FSDPConfig(), None, {"all_gather": 112.0, "reduce_scatter": 24.0}, 136.0),
    ],
)
def test_frozen_parameters_are_gathered_where_they_are_shared_out_and_never_reduced(
    strategy: StrategyConfig, stage: int | None, sent: dict[str, float], textbook: float
) -> None:
    zero = None if stage is None else {"stage": stage}
    found = volume(strategy, layout=FROZEN, zero=zero, gather=torch.float32 if stage != 0 else None)
    assert (found.bytes, found.textbook, found.elements) == (sent, textbook, 12)


@pytest.mark.parametrize(("gathered", "holds"), [(39, False), (40, True), (50, True), (56, True), (57, False)])
def test_zero_3_gathers_frozen_parameters_for_backward_only_where_a_gradient_goes_through_them(
    gathered: int, holds: bool
) -> None:
    """Before the first that trains, there is no backward: 12 twice and 16 once; behind it, 28 twice."""
    found = zero3(layout=FROZEN)
    assert found.textbook == 136.0
    assert found.holds(count({"all_gather": gathered * 4, "reduce_scatter": 48})) is holds
    assert not found.holds(count({"all_gather": 160, "reduce_scatter": 112}))  # nor are they reduced


def test_small_frozen_parameters_stay_gathered_as_all_small_ones() -> None:
    found = zero3(3, threshold=10, layout=FROZEN)
    assert found.bytes == {"all_gather": (10 + 6 + 3 * 2 * 12) * 2.0, "reduce_scatter": 3 * 24.0}
    assert found.most == {"all_gather": found.bytes["all_gather"]}
    assert found.notes == [kept(found, 2, 10)]


def test_a_module_in_two_places_may_gather_for_each() -> None:
    shared = Layout([Weight(12, 4, 1, 0, uses=2), Weight(6, 3, 2, None, uses=2)])
    found = zero3(2, layout=shared)
    # 12 twice and the tied 6 four times; the second place may take 12 twice more
    assert found.bytes == {"all_gather": 2 * 48 * 2.0, "reduce_scatter": 2 * 18 * 2.0}
    assert found.most == {"all_gather": 2 * 72 * 2.0}
    assert found.notes == [TIED_NOTE, "a module that is used in several places may gather for each"]


def test_fsdp_gathers_a_block_in_two_places_for_each() -> None:
    found = volume(FSDPConfig(), layout=Layout([Weight(12, 4, 1, 0, uses=2)]), gather=torch.float32)
    assert found.holds(count({"all_gather": 4 * 48, "reduce_scatter": 48}))  # two forwards and two backwards
    assert not found.holds(count({"all_gather": 4 * 48 + 4, "reduce_scatter": 48}))
    assert not found.holds(count({"all_gather": 4 * 48, "reduce_scatter": 96}))  # its gradients are reduced once


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("stage", "settings", "reduced"),
    [
        (1, BF16, 96.0),  # 24 x 4 x 1
        (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, 92.0),
        (1, {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 92.0),
        (1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 92.0),
        (2, BF16, 92.0),
    ],
)
def test_deepspeeds_own_optimizer_for_bf16_reduces_its_padding(
    stage: int, settings: dict[str, Any], reduced: float
) -> None:
    strategy = Zero1Config() if stage == 1 else Zero2Config()
    found = volume(strategy, zero={"stage": stage}, settings=settings, gather=torch.bfloat16)
    assert found.bytes == {"all_reduce": reduced, "all_gather": 24.0}  # 24 x 2 / 2


def test_with_offload_the_padding_is_not_reduced() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    found = volume(Zero1Config(offload_optimizer=True), zero=zero, settings=BF16, gather=torch.bfloat16)
    assert found.bytes == {"all_reduce": 92.0, "all_gather": 24.0}


# Counted against expected


def count(payload: dict[str, int], ranks: int = 2, syncs: int = 1, gradients: int = 0) -> StepCount:
    """A step that sends these payloads in one micro-step and their reductions in `syncs`."""
    sent = [Collective(kind, size, max(2, size // 4)) for kind, size in payload.items()]
    extra = [[Collective("all_reduce", 0, 2)] for _ in range(syncs - 1)]
    return StepCount(ranks, [*extra, sent, []], gradient_elements=gradients)


EXACT = Volume(1, {"all_reduce": 92.0, "all_gather": 48.0})


@pytest.mark.parametrize(
    ("payload", "holds"),
    [
        ({"all_reduce": 92, "all_gather": 96}, True),
        ({"all_reduce": 91, "all_gather": 96}, False),
        ({"all_reduce": 93, "all_gather": 96}, False),
        ({"all_reduce": 92, "all_gather": 95}, False),
        ({"all_reduce": 92, "all_gather": 97}, False),
        ({"all_reduce": 92}, False),  # less of a kind
        ({"all_reduce": 92, "all_gather": 96, "broadcast": 1}, False),  # a kind that nobody expected
        ({"all_gather": 96}, False),
    ],
)
def test_a_byte_more_or_less_is_seen(payload: dict[str, int], holds: bool) -> None:
    assert EXACT.holds(count(payload)) is holds


def test_a_reduction_more_or_less_is_seen() -> None:
    payload = {"all_reduce": 92, "all_gather": 96}
    assert not EXACT.holds(count(payload, syncs=2))
    assert not Volume(2, EXACT.bytes).holds(count(payload))
    assert Volume(None, EXACT.bytes).holds(count(payload, syncs=2))


def test_single_numbers_are_nobodys_business() -> None:
    step = count({"all_reduce": 92, "all_gather": 96})
    step.micro_steps[-1].append(Collective("all_reduce", 4, 1))  # a norm, or an overflow, in the update
    assert EXACT.holds(step)
    step.micro_steps[-1].append(Collective("all_reduce", 8, 2))
    assert not EXACT.holds(step)


def test_a_step_that_leaves_parameters_without_gradient_is_not_held_to_it() -> None:
    expected = volume(DDPConfig())
    exact, less = {"all_reduce": 92}, {"all_reduce": 44}
    assert expected.unused(count(less, gradients=11)) == 12
    assert expected.holds(count(less, gradients=11))
    assert expected.holds(count(exact, syncs=3, gradients=22))
    # All have one, or nobody saw any: then it is.
    for gradients in (23, 0):
        assert expected.unused(count(less, gradients=gradients)) == 0
        assert not expected.holds(count(less, gradients=gradients))
        assert expected.holds(count(exact, gradients=gradients))
    assert EXACT.unused(count(less, gradients=11)) == 0  # it does not know how many there are


@pytest.mark.parametrize(("gathered", "holds"), [(95, False), (96, True), (150, True), (200, True), (201, False)])
def test_a_range_holds_between_its_ends(gathered: int, holds: bool) -> None:
    expected = Volume(1, {"all_reduce": 92.0, "all_gather": 48.0}, most={"all_gather": 100.0})
    assert expected.holds(count({"all_reduce": 92, "all_gather": gathered})) is holds


def test_rounding_of_three_ranks_is_no_surprise() -> None:
    layout = Layout([Weight(1_000_003, 1_000_003, 1, None)])
    expected = volume(DDPConfig(), 3, layout=layout)
    assert expected.holds(count({"all_reduce": 4 * 1_000_003}, ranks=3))
    assert not expected.holds(count({"all_reduce": 4 * 1_000_003 - 1}, ranks=3))


def test_alone_any_gradient_traffic_is_a_surprise() -> None:
    nothing = volume(SingleConfig(), 1)
    assert nothing.holds(StepCount(1, [[], []]))
    assert not nothing.holds(StepCount(1, [[Collective("all_reduce", 92, 23)], []]))
