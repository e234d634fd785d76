"""The Triton kernels against :mod:`kvpass.reference`: under Triton's interpreter on a CPU, compiled on a GPU.

Parameters marked ``gpu`` are the same tests, wider.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from products import in_turns

if not torch.cuda.is_available():
    late = "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if late:  # its own functions decide when they are imported
        raise RuntimeError("triton was imported before TRITON_INTERPRET was set; set it in tests/conftest.py")
pytest.importorskip("triton")

import triton  # noqa: E402

from kvpass import ops, reference  # noqa: E402
from kvpass.first_tokens import turns  # noqa: E402
from kvpass.formats import (  # noqa: E402
    SCALE_TILE,
    KVBuffers,
    KVFormat,
    format_names,
    get_format,
    register_format,
)
from kvpass.kernels import ptxas  # noqa: E402
from kvpass.tiles import Configuration  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = (pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU"))

# Registered as a user would: made of existing parts, in combinations that no built-in format has.
register_format(KVFormat("test_mx_block32", "e2m1", block_scale="e8m0", block=32))
register_format(KVFormat("test_nvfp4_block32", "e2m1", block_scale="e4m3", block=32, tensor_scale=True))
register_format(KVFormat("test_e4m3_plain", "e4m3"))
DERIVED = ("nvfp4+4over6", "fp4_mx_block16+sweep", "fp8_e4m3+centred+rotated", "nvfp4+centred+rotated+sweep")
FORMATS = (*format_names(), *DERIVED)
FP4 = tuple(name for name in FORMATS if get_format(name).codec == "e2m1")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter's NaN and inf


def wide(*values):
    """The values as parameters of a test that only a GPU is quick enough for."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=GPU) for v in values]


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """What a kernel does not write is NaN."""
    real = torch.empty

    def empty(*args, **kwargs):
        tensor = real(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)
    torch.manual_seed(0)


def poisoned_buffers(fmt: KVFormat, batch: int, kv_heads: int, max_len: int, head_dim: int, keep: int = 0) -> KVBuffers:
    """Buffers (on the CPU) of which every byte is 0xFF, a NaN of every encoding, and another scale and centre for each
    head."""
    buffers = fmt.allocate(batch, kv_heads, max_len, head_dim, "cpu", keep=keep)
    buffers.codes.view(torch.uint8).fill_(0xFF)
    if buffers.block_scale is not None:
        buffers.block_scale.fill_(0xFF)
    if buffers.scale is not None:
        buffers.scale.copy_(torch.tensor([0.37, 1.9, 0.25, 0.05, 11.0])[torch.arange(kv_heads) % 5])
    if buffers.centre is not None:
        buffers.centre.copy_(torch.linspace(-3.0, 2.0, kv_heads * head_dim).view(kv_heads, head_dim))
    if buffers.kept is not None:
        buffers.kept.fill_(torch.nan)
    return buffers


def first_of(keep: int) -> int:
    """Of ``keep`` slots that a test keeps, how many are the first; the others are the newest."""
    return (keep + 1) // 2


def to_device(buffers: KVBuffers) -> KVBuffers:
    return KVBuffers(*(None if t is None else t.to(DEVICE) for t in buffers))


def clone(buffers: KVBuffers) -> KVBuffers:
    return KVBuffers(*(None if t is None else t.clone() for t in buffers))


def assert_same_bytes(actual: KVBuffers, expected: KVBuffers) -> None:
    codes, wanted = actual.codes.cpu(), expected.codes.cpu()
    if codes.dtype == torch.bfloat16:  # the payload of a NaN is nobody's business
        assert torch.equal(codes.isnan(), wanted.isnan())
        codes, wanted = codes.nan_to_num(nan=0.0).view(torch.int16), wanted.nan_to_num(nan=0.0).view(torch.int16)
    different = (codes != wanted).nonzero()
    assert not len(different), f"{len(different)} codes differ, the first at {different[0].tolist()}"
    if expected.block_scale is not None:
        different = (actual.block_scale.cpu() != expected.block_scale.cpu()).nonzero()
        assert not len(different), f"{len(different)} block scales differ, the first at {different[0].tolist()}"
    if expected.kept is not None:
        assert_same_values(actual.kept, expected.kept)
        assert torch.equal(actual.kept_slots.cpu(), expected.kept_slots.cpu())


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, signs of zeros included; any NaN for a NaN."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = (torch.where(t.isnan(), 0.0, t) for t in (actual, expected))
    assert torch.equal(actual, expected) and torch.equal(actual.signbit(), expected.signbit())


def launch_store(key, value, positions, key_buffers, value_buffers, key_format, value_format, keep_first=0):
    from kvpass.kernels.store import store

    store(key, value, positions.to(DEVICE), *key_buffers, *value_buffers, key_format, value_format, keep_first)


def launch_attention(query, key, value, positions, mask, *arguments, softcap=0.0, sinks=None):
    from kvpass.kernels.attention import attention

    mask = None if mask is None else mask.to(DEVICE)
    return attention(
        query.to(DEVICE), *key, *value, positions.to(DEVICE), mask, *arguments, softcap=softcap, sinks=sinks
    )


def check_store(key, value, positions, key_format, value_format, max_len, keep=0):
    """Store by kernel and by reference into poisoned buffers: the same bytes, also where nothing was written."""
    key_row, value_row = get_format(key_format), get_format(value_format)
    expected = [
        poisoned_buffers(row, *x.shape[:2], max_len, x.shape[3], keep)
        for row, x in ((key_row, key), (value_row, value))
    ]
    actual = [to_device(clone(buffers)) for buffers in expected]
    fits = (positions >= 0) & (positions < max_len)
    reference.write(expected[0], key_row, key[:, :, fits], positions[fits], first_of(keep))
    reference.write(expected[1], value_row, value[:, :, fits], positions[fits], first_of(keep))
    launch_store(key.to(DEVICE), value.to(DEVICE), positions, *actual, key_format, value_format, first_of(keep))
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bytes(got, wanted)


def spread(*shape: int) -> torch.Tensor:
    """Normal values whose magnitude changes from one run of 16 to the next, and with it every block scale."""
    x = torch.randn(shape)
    return (x.unflatten(-1, (-1, 16)) * torch.exp2(torch.randint(-14, 9, (*shape[:-1], shape[-1] // 16, 1)))).flatten(
        -2
    )


# ---------------------------------------------------------------------------------------------------------------- store


STORED_SHAPES = [
    # batch, KV heads, length, head_dim
    (1, 3, 5, 64),
    (2, 1, 1, 96),
    (2, 5, 37, 128),
    (1, 2, 17, 256),
    (3, 2, 700, 96),
    (32, 8, 1, 128),
    (2, 1, 33, 512),
]


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        *itertools.product(FORMATS, STORED_SHAPES[:2], [BF16]),
        *wide(*in_turns(FORMATS, STORED_SHAPES, turns=(FP16, FP32, BF16))),
    ],
)
def test_store_gives_the_bytes_of_the_reference(name, shape, dtype):
    batch, kv_heads, length, head_dim = shape
    if head_dim > 256:  # as much as is rotated
        name = name.replace("+rotated", "")
    max_len = length + 40
    positions = torch.randperm(max_len)[:length].sort().values
    key, value = (spread(batch, kv_heads, length, head_dim).to(dtype) for _ in range(2))
    check_store(key, value, positions, name, name, max_len)


# As many rows as make tiles of several: of one head each, or of single tokens of many.
@pytest.mark.parametrize("batch, length", [(4, 67), (257, 1)])
@pytest.mark.parametrize(
    "key_format, value_format, key_dim, value_dim",
    [
        ("nvfp4+centred+rotated+4over6", "nvfp4+4over6", 128, 128),
        ("fp8_e4m3+centred+rotated", "mxfp4", 96, 64),
        ("int8+rotated", "bf16", 64, 64),
        *wide(("nvfp4+rotated", "nvfp4", 256, 512)),
    ],
)
def test_store_of_many_rows(key_format, value_format, key_dim, value_dim, batch, length):
    key, value = (spread(batch, 4, length, dim).to(BF16) for dim in (key_dim, value_dim))
    positions = torch.randperm(length + 40)[:length].sort().values
    check_store(key, value, positions, key_format, value_format, length + 40, keep=12 if length > 1 else 0)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rotation_of_every_block_gives_the_bits_of_the_reference(head_dim, dtype):
    from kvpass.kernels.rotate import rotate_rows

    x = spread(2, 3, 5, head_dim).to(dtype)
    assert torch.equal(rotate_rows(x.to(DEVICE), FP32).cpu(), reference.rotate(x))


@pytest.mark.parametrize("name", FORMATS)
def test_store_of_special_values(name):
    x = spread(1, 2, 8, 64)
    x[0, 0, 0] = 0.0
    x[0, 0, 1] = -0.0
    x[0, 0, 2] *= 1e-40  # subnormal fp32
    x[0, 0, 3, 5], x[0, 0, 3, 40] = torch.inf, -torch.inf
    x[0, 0, 4, 7], x[0, 0, 4, 8] = torch.nan, -torch.nan
    # Ties of e2m1 under a block scale of exactly 1 (amax 6), and of the e4m3 block scale itself.
    x[0, 0, 5] = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0]).repeat(8) * get_tensor_scale(name)
    x[0, 0, 6] = 6 * 1.0625
    x[0, 0, 7] = torch.exp2(torch.linspace(-12, 11, 64)) * 1.1875
    x[0, 1, 0], x[0, 1, 1] = torch.finfo(FP32).max, torch.finfo(FP32).tiny
    x[0, 1, 2] = torch.exp2(torch.arange(64) - 30.0)
    x[0, 1, 3] = x[0, 1, 2] * 3
    check_store(x, -x, torch.arange(8) + 28, name, name, 36)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4+4over6", "fp4_mx_block16", "mxfp4"])
def test_store_of_values_at_and_around_every_midpoint(name):
    fmt = get_format(name)
    x = spread(1, 2, 6, 64)
    x[0, 0, 0] *= 1e-38  # divisors of 2**-127 in mxfp4
    midpoints = torch.tensor(reference.E2M1_MIDPOINTS, dtype=torch.float64).repeat_interleave(2)
    scale = torch.full((2,), get_tensor_scale(name)) if fmt.tensor_scale else None
    bits = reference.quantize(x, fmt, scale)[1]
    divisors = reference._decode_block_scale(bits, fmt).double() * get_tensor_scale(name)
    blocks = x.unflatten(-1, (-1, fmt.block))  # the first value of each keeps its scale
    blocks[..., 0] = blocks.abs().amax(-1)
    for ulps in (-1, 0, 1):
        near = (divisors[..., None] * midpoints).float().view(torch.int32) + ulps
        blocks[..., 1:15] = near.view(FP32) * torch.tensor([1.0, -1.0]).repeat(7)
        check_store(x, -x, torch.arange(6) + 28, name, name, 36)


def get_tensor_scale(name: str) -> float:
    return 0.37 if get_format(name).tensor_scale else 1.0


@pytest.mark.parametrize("head_dim", [256, *wide(64)])
@pytest.mark.parametrize("name", ["test_e4m3_plain", "fp8_e5m2"])
def test_store_of_every_half_precision_value(name, head_dim):
    x = torch.arange(-32768, 32768).to(torch.int16).view(FP16).view(1, 1, -1, head_dim)
    fmt = get_format(name)
    buffers = fmt.allocate(1, 1, x.shape[2], head_dim, DEVICE)
    codes, _ = reference.quantize(x, fmt, None if buffers.scale is None else buffers.scale.cpu())
    launch_store(x.to(DEVICE), x.to(DEVICE), torch.arange(x.shape[2]), buffers, buffers, name, name)
    assert torch.equal(buffers.codes.cpu(), codes)


def test_store_takes_strided_inputs_and_formats_and_head_dims_of_their_own():
    key = spread(2, 3, 2, 64).transpose(1, 2)  # as projections give it: [batch, length, heads, head_dim] transposed
    value = spread(2, 2, 3, 96).mT.contiguous().mT  # head_dim is not the innermost
    check_store(key, value, torch.tensor([31, 32, 40]), "nvfp4", "fp8_e4m3", 41)
    check_store(key, value, torch.tensor([31, 32, 40]), "fp8_e5m2", "test_mx_block32", 41)
    latent, rotary = spread(2, 1, 3, 512), spread(2, 1, 3, 64)  # what DeepSeek caches
    check_store(latent, rotary, torch.tensor([31, 32, 40]), "nvfp4", "fp8_e4m3", 41)


@pytest.mark.parametrize(
    "name", ["mxfp4+sweep", "test_nvfp4_block32+sweep", "fp8_e5m2+rotated", "nvfp4+centred", "int8+rotated"]
)
def test_store_of_further_derived_formats(name):
    key, value = spread(2, 2, 18, 96).to(BF16), spread(2, 2, 18, 64).to(BF16)
    check_store(key, value, torch.arange(18) + 3, name, name, 30)


def test_store_chooses_the_scale_of_blocks_in_every_binade():
    x = torch.exp2(torch.linspace(-20, 14, 64)).view(1, 1, -1, 1) * torch.randn(1, 1, 64, 64)
    for name in ("nvfp4+sweep", "nvfp4+4over6", "fp4_mx_block16+sweep", "int8"):
        check_store(x, -x, torch.arange(64), name, name, 64)


def test_store_compares_with_the_product_as_it_is_not_as_it_is_rounded():
    # Values next to a midpoint times a scale of 24 bits, where a quotient in fp32 is often rounded onto the midpoint.
    fmt, scale = get_format("nvfp4"), 1.0 + 2.0**-23 * 5592405
    midpoints = torch.tensor(reference.E2M1_MIDPOINTS, dtype=torch.float64).repeat(2)
    x = torch.zeros(1, 1, 9, 16)
    x[..., 0] = 6 * scale
    products = (midpoints * scale).to(FP32).view(torch.int32)
    for steps in range(9):
        x[0, 0, steps, 1:15] = (products + steps - 4).view(FP32)
    buffers = [fmt.allocate(1, 1, 9, 16, DEVICE, torch.tensor([scale])) for _ in range(2)]
    launch_store(x.to(DEVICE), x.to(DEVICE), torch.arange(9), *buffers, "nvfp4", "nvfp4")
    codes = buffers[0].codes.cpu()
    nibbles = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)[0, 0, :, 1:15]
    rises = x[0, 0, :, 1:15].double() > midpoints * scale
    assert torch.equal(nibbles - torch.arange(7).repeat(2), rises.to(torch.uint8))
    assert rises.any() and not rises.all()


@pytest.mark.parametrize("name", ["nvfp4+centred+rotated", "fp8_e4m3", "bf16"])
@pytest.mark.parametrize("start, length, keep, max_len", [(2, 7, 4, 40), (0, 14, 9, 16), (36, 1, 8, 40), (1, 2, 8, 6)])
def test_store_keeps_the_first_and_the_newest_slots(name, start, length, keep, max_len):
    x = spread(2, 2, length, 64).to(BF16)
    check_store(x, x, torch.arange(length) + start, name, name, max_len, keep=keep)


def test_store_forgets_what_is_kept_of_a_slot_that_another_token_takes():
    """Slots with gaps between them: what is written and not kept has no row that still holds what was there before."""
    fmt = get_format("nvfp4")
    expected = poisoned_buffers(fmt, 2, 1, 40, 64, 8)
    actual = to_device(clone(expected))
    for slots in (torch.arange(20), torch.tensor([17, 30]), torch.tensor([19, 2, 18]), torch.tensor([2, 30, 35])):
        x = spread(2, 1, len(slots), 64).to(BF16)
        reference.write(expected, fmt, x, slots, 4)
        launch_store(x.to(DEVICE), x.to(DEVICE), slots, actual, actual, "nvfp4", "nvfp4", 4)
        assert_same_bytes(actual, expected)
    assert 17 not in expected.kept_slots and 2 in expected.kept_slots


def test_store_keeps_no_more_than_there_are_rows():
    fmt = get_format("nvfp4")
    expected = poisoned_buffers(fmt, 1, 2, 16, 64, 4)
    actual = to_device(clone(expected))
    x = spread(1, 2, 9, 64)
    reference.write(expected, fmt, x, torch.arange(9), 8)
    launch_store(x.to(DEVICE), x.to(DEVICE), torch.arange(9), actual, actual, "nvfp4", "nvfp4", 8)
    assert_same_bytes(actual, expected)


def test_store_keeps_the_newest_slots_of_a_ring():
    """Pieces that go round: 4 rows for 12 slots, beside 4 of the first."""
    fmt = get_format("nvfp4")
    expected = poisoned_buffers(fmt, 1, 2, 16, 64, 8)
    actual = to_device(clone(expected))
    start = 0
    for length in (3, 12, 7, 1, 16, 2):
        slots, x = (torch.arange(length) + start) % 16, spread(1, 2, length, 64).to(BF16)
        reference.write(expected, fmt, x, slots, 4)
        launch_store(x.to(DEVICE), x.to(DEVICE), slots, actual, actual, "nvfp4", "nvfp4", 4)
        assert_same_bytes(actual, expected)
        start += length


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "bf16"])
def test_store_skips_slots_outside_the_cache(name):
    x = spread(1, 2, 4, 64)
    check_store(x, x, torch.tensor([-1, 34, 35, 36]), name, name, 35)


# ---------------------------------------------------------------------------------------------------------------- learn


def turned(batch: int, kv_heads: int, length: int, head_dim: int, pairs: int) -> torch.Tensor:
    """Keys around a vector that rotary embedding turns: pairs are halves in one head, neighbours in the next, and the
    one after is not turned."""
    x = torch.randn(batch, kv_heads, length, head_dim)
    frequencies = 1e4 ** (-torch.arange(pairs) / max(pairs, 1))
    angle = torch.arange(length)[:, None] * frequencies
    x[:, ::3, :, : 2 * pairs] += 2 * torch.cat([angle.cos(), angle.sin()], -1)
    x[:, 1::3, :, : 2 * pairs] += 2 * torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)
    x[:, 2::3] += 2
    return x


def check_learn(key, value, key_format, value_format, pairs=0, is_written=None, given=()):
    """Learn as on CUDA and by reference what is not ``given`` (``key_scale``, ...). Centres differ by the order of
    sums, and scales are those that the reference has for the same centre, to the bit."""
    factors = turns(tuple(1e4 ** (-i / pairs) for i in range(pairs)), 4096, "cpu") if pairs else None
    sides = []
    for side, x, name in (("key", key, key_format), ("value", value, value_format)):
        fmt, kv_heads, head_dim = get_format(name), x.shape[1], x.shape[3]
        scale = torch.full((kv_heads,), torch.nan) if fmt.learns_scale and f"{side}_scale" not in given else None
        learns_centre = fmt.centred and f"{side}_centre" not in given
        centre = torch.linspace(-3.0, 2.0, kv_heads * head_dim).view(kv_heads, head_dim) if fmt.centred else None
        sides.append((x, fmt, scale, centre, learns_centre, factors if side == "key" else None))
    buffers = [t if t is None else t.to(DEVICE, copy=True) for side in sides for t in side[2:4]]
    others = [t if t is None else t.to(DEVICE) for t in (factors, is_written)]
    learns = (side[4] for side in sides)
    ops._learn_cuda(key.to(DEVICE), value.to(DEVICE), *buffers, *others, *learns, key_format, value_format)
    actual = [t if t is None else t.cpu() for t in buffers]
    for (x, fmt, _, old, learns_centre, of_side), scale, centre in zip(sides, actual[::2], actual[1::2], strict=True):
        if learns_centre:
            largest = x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax((0, 2, 3))
            error = (centre - reference.centre_of(x, of_side, is_written)).abs()
            assert (error <= 2.0**-20 * largest[:, None]).all()
        elif fmt.centred:
            assert torch.equal(centre, old)
        if scale is not None:
            assert torch.equal(scale, reference.scale_of(x, fmt.learnt_step, centre, is_written))


@pytest.mark.parametrize("key_format, value_format", [("nvfp4+centred", "int8+centred"), ("fp8_e4m3+centred", "nvfp4")])
@pytest.mark.parametrize(
    "batch, kv_heads, length, key_dim, value_dim, pairs, dtype",
    [
        (1, 3, 40, 64, 64, 32, BF16),
        (2, 3, 37, 96, 80, 16, FP32),  # not all channels are turned
        (1, 5, 1, 48, 16, 24, FP16),  # a token is its own centre
        (1, 2, 20, 32, 512, 0, BF16),
        *wide(
            (1, 8, 256, 128, 128, 64, BF16),
            (2, 3, 256, 256, 64, 128, FP16),
            (5, 4, 100, 512, 128, 256, BF16),
            (64, 2, 9, 192, 128, 32, FP32),
        ),
    ],
)
def test_learn_gives_what_the_reference_does(
    batch, kv_heads, length, key_dim, value_dim, pairs, dtype, key_format, value_format
):
    key = turned(batch, kv_heads, length, key_dim, pairs).to(dtype)
    value = (spread(batch, kv_heads, length, value_dim) + 1).to(dtype)
    check_learn(key, value, key_format, value_format, pairs)


@pytest.mark.parametrize(
    "given",
    [
        ("key_scale",),
        ("key_centre",),
        ("value_scale", "value_centre"),
        ("key_scale", "value_centre"),
        ("key_scale", "key_centre", "value_centre"),
    ],
)
def test_learn_leaves_what_is_given(given):
    check_learn(turned(1, 2, 9, 32, 16), spread(1, 2, 9, 48), "nvfp4+centred", "nvfp4+centred", 16, given=given)


def test_learn_of_many_tokens_sums_in_torch(monkeypatch):
    key, value = turned(3, 3, 7, 64, 32), spread(3, 3, 7, 48) + 1
    original, sums = reference.centre_of, []
    monkeypatch.setattr(reference, "centre_of", lambda *args: sums.append(args) or original(*args))
    for most, in_torch in ((21, 0), (20, 1)):
        monkeypatch.setattr(ops, "_MOST_TOKENS", most)
        for given, learnt in (((), 2), (("key_centre",), 1), (("value_centre",), 1)):
            sums.clear()
            check_learn(key, value, "nvfp4+centred", "nvfp4+centred", 32, torch.arange(7) < 5, given)
            assert len(sums) == learnt * (1 + in_torch)  # once for the comparison


def test_learn_takes_strided_inputs():
    key = turned(2, 7, 3, 64, 32).transpose(1, 2)  # as projections give it
    value = spread(2, 3, 7, 96).mT.contiguous().mT[:, :, :7]  # head_dim is not the innermost
    check_learn(key, value, "nvfp4+centred", "nvfp4+centred", 32)
    whole = spread(1, 3, 40, 160)
    check_learn(whole[:, :, 5:25, :64], whole[:, :, 5:25, 64:], "nvfp4+centred", "nvfp4", 32)


@pytest.mark.parametrize("written", [20, 0])
def test_learn_does_not_count_slots_of_zeros(written):
    is_written = torch.arange(50) < written
    key, value = (x * is_written[:, None] for x in (turned(1, 3, 50, 64, 32), spread(1, 3, 50, 64)))
    check_learn(key, value, "nvfp4+centred", "nvfp4+centred", 32, is_written)
    check_learn(key, value, "nvfp4", "int8+centred", 0, is_written, given=("value_centre",))


@pytest.mark.parametrize("dtype", DTYPES)
def test_learn_of_special_values(dtype):
    x = turned(2, 6, 9, 64, 16)
    x[0, 0, 3, 5], x[1, 1, 2, 8], x[0, 2, 0, 40], x[0, 3, 7, 21] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[:, 4] = 0.0
    x[0, 5], x[1, 5] = torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4
    x = x.to(dtype)
    check_learn(x, x[:, :, :, :48], "nvfp4+centred", "nvfp4+centred", 16)
    check_learn(x, -x, "int8", "nvfp4", 16)
    check_learn(x[1:], x[1:], "nvfp4", "nvfp4")


def test_learn_launches_nothing_where_nothing_is_learnt(monkeypatch):
    from kvpass.kernels import learn

    monkeypatch.setattr(learn, "_learn_kernel", None)
    x = torch.randn(1, 2, 5, 64)
    check_learn(x, x, "fp8_e4m3", "bf16")
    check_learn(x, x, "nvfp4+centred", "int8", 32, given=("key_scale", "key_centre", "value_scale"))
    check_learn(x[:0], x[:0], "fp8_e4m3", "fp8_e4m3")


def test_learn_refuses_what_it_cannot_address():
    from kvpass.kernels.learn import learn

    def tensors(dtype=FP32, heads=2, dim=64, centre_dim=64, pairs=32, length=5):
        x, scale = torch.zeros(1, 2, 5, dim, dtype=dtype), torch.zeros(heads)
        return x, x, scale, torch.zeros(2, centre_dim), scale, None, torch.zeros(length + 1, pairs, 2)

    formats = None, True, False, "nvfp4+centred", "nvfp4"
    for options, message in (
        ({"dtype": torch.float64}, "key is torch.float64; allowed"),
        ({"heads": 3}, r"key_scale is torch.float32 of shape \(3,\)"),
        ({"centre_dim": 32}, r"key_centre is torch.float32 of shape \(2, 32\)"),
        ({"pairs": 33}, r"turns is torch.float32 of shape \(6, 33, 2\)"),
        ({"length": 4}, r"turns is torch.float32 of shape \(5, 32, 2\)"),
        ({"dim": 40, "centre_dim": 40, "pairs": 20}, "cannot hold head_dim 40"),
    ):
        with pytest.raises(ValueError, match=message):
            learn(*(t if t is None else t.to(DEVICE) for t in tensors(**options)), *formats)
    x, _, scale, _, _, _, factors = tensors()
    with pytest.raises(ValueError, match="key_centre is missing"):
        learn(x, x, scale, None, scale, None, factors, *formats)
    with pytest.raises(ValueError, match="may differ in head_dim only"):
        learn(x, x[:, :, :4], scale, None, scale, None, None, None, False, False, "nvfp4", "nvfp4")


# ----------------------------------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("dtype", [BF16, FP32, *wide(FP16)])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_decodes_every_code(name, dtype):
    from kvpass.kernels.dequantize import dequantize

    fmt, max_len = get_format(name), 256 if DEVICE == "cuda" else 64
    buffers = fmt.allocate(1, 2, max_len, 256, "cpu")
    if fmt.codec == "bf16":
        buffers.codes.copy_(torch.randint(-32768, 32768, buffers.codes.shape).to(torch.int16).view(BF16))
    else:
        buffers.codes.copy_(torch.arange(buffers.codes.numel()).view_as(buffers.codes) % 255)  # 255 is odd: all meet
    if buffers.block_scale is not None:
        buffers.block_scale.copy_(torch.randperm(buffers.block_scale.numel()).view_as(buffers.block_scale) % 256)
    if buffers.scale is not None:
        buffers.scale.copy_(torch.tensor([0.37, 1.9]))
    if buffers.centre is not None:
        buffers.centre.normal_()
    actual = dequantize(*to_device(buffers), torch.tensor([max_len - 1], device=DEVICE), name, dtype)
    assert_same_values(actual, reference.dequantize(buffers, fmt, dtype))


DEQUANTIZED = ["bf16", "fp8_e4m3", "nvfp4+centred+rotated", "fp4_mx_block16+centred"]
DIM_AND_KEEP = [(80, 0), (80, 4), (512, 0)]


@pytest.mark.parametrize(
    "name, dim_and_keep, length",
    [
        *itertools.product(DEQUANTIZED, DIM_AND_KEEP, [1, 33]),
        *wide(*in_turns(DEQUANTIZED, DIM_AND_KEEP, turns=(15, 16, 17, 63))),
    ],
)
def test_dequantize_is_zero_past_the_length(name, dim_and_keep, length):
    from kvpass.kernels.dequantize import dequantize

    head_dim, keep = dim_and_keep
    fmt = get_format(name if head_dim <= 256 else name.removesuffix("+rotated"))  # 256 is as much as is rotated
    name = fmt.name
    buffers = poisoned_buffers(fmt, 2, 2, 70, head_dim, keep)
    reference.write(buffers, fmt, spread(2, 2, length, head_dim), torch.arange(length), first_of(keep))
    actual = dequantize(*to_device(buffers), torch.arange(length, device=DEVICE), name, BF16)
    assert_same_values(actual[:, :, :length], reference.dequantize(buffers.first(length), fmt, BF16))
    assert torch.equal(actual[:, :, length:].cpu(), torch.zeros(2, 2, 70 - length, head_dim, dtype=BF16))
    overrun = dequantize(*to_device(buffers), torch.tensor([70], device=DEVICE), name, BF16)
    assert overrun.isnan().all()


# ------------------------------------------------------------------------------------------------------------ attention


def make_cache(
    name: str, batch: int, kv_heads: int, max_len: int, head_dim: int, length: int, keep: int = 0
) -> KVBuffers:
    """A cache with ``length`` random tokens on the device, poisoned past them."""
    fmt = get_format(name)
    buffers = poisoned_buffers(fmt, batch, kv_heads, max_len, head_dim, keep)
    if buffers.scale is not None:
        buffers.scale.clamp_(max=2)
    buffers = to_device(buffers)
    x = torch.randn(batch, kv_heads, length, head_dim, device=DEVICE) * (torch.rand(head_dim, device=DEVICE) + 0.3)
    reference.write(buffers, fmt, x, torch.arange(length, device=DEVICE), first_of(keep))
    return buffers


def check_attention(
    key_format="nvfp4",
    value_format=None,
    dtype=BF16,
    head_dim=64,
    value_dim=None,
    group=4,
    query_len=1,
    length=33,
    max_len=None,
    batch=1,
    kv_heads=2,
    mask=None,
    is_causal=False,
    query_scale=1.0,
    softcap=0.0,
    sinks=None,
    keep=0,
):
    """Kernel, and SDPA in the query's dtype on the decoded K and V, against fp64 on the same bytes.

    The kernel may err as SDPA does, or as rounding the exact answer does, times what two summation orders differ by;
    in fp32, where the hardware's exp2 is off by more than a summation, twice that. What SDPA has not (``softcap``,
    ``sinks``), it is given as the bias that makes the same of its scores, and as a last slot whose value is zero.
    """
    value_format, value_dim = value_format or key_format, value_dim or head_dim
    max_len = max_len or length + 9
    key = make_cache(key_format, batch, kv_heads, max_len, head_dim, length, keep)
    value = make_cache(value_format, batch, kv_heads, max_len, value_dim, length, keep)
    query = torch.randn(batch, query_len, kv_heads * group, head_dim).mul(query_scale).to(dtype).transpose(1, 2)
    positions = torch.arange(length - query_len, length)
    scale = head_dim**-0.5 / query_scale
    extras = {"softcap": softcap, "sinks": None if sinks is None else sinks.to(DEVICE)}
    arguments = (positions, mask, scale, is_causal, key_format, value_format)
    actual = launch_attention(query, key, value, *arguments, **extras)
    assert actual.shape == (batch, kv_heads * group, query_len, value_dim) and actual.dtype == dtype

    query, positions = query.to(DEVICE), positions.to(DEVICE)
    decoded = [
        reference.dequantize(b.first(length), get_format(n), torch.float64)
        for b, n in ((key, key_format), (value, value_format))
    ]
    mask = None if mask is None else mask.to(DEVICE)
    exact_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = reference.attention(query.double(), *decoded, positions, exact_mask, scale, is_causal, **extras)

    bias = torch.zeros(batch, kv_heads * group, query_len, length, device=DEVICE)
    if mask is not None:
        cut = mask[..., :length].expand_as(bias)
        bias = bias.masked_fill(~cut, -torch.inf) if mask.dtype == torch.bool else bias + cut
    if is_causal:
        bias = bias.masked_fill(torch.arange(length, device=DEVICE) > positions[:, None], -torch.inf)
    k, v = (t.to(dtype).repeat_interleave(group, 1) for t in decoded)
    capped = bias.to(dtype)
    if softcap:
        scores = query.float() @ k.float().mT * scale
        capped = (bias + softcap * torch.tanh(scores / softcap) - scores).to(dtype)
    if sinks is not None:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        column = sinks.to(DEVICE, dtype)[:, None, None].expand(batch, -1, query_len, 1)
        capped = torch.cat([capped, column], -1)
    peer = F.scaled_dot_product_attention(query, k, v, attn_mask=capped, scale=scale)
    blind = (bias == -torch.inf).all(-1)
    assert (actual[blind] == 0).all(), "a row that sees nothing must be zero"
    sees = ~blind

    def errors(x):
        difference = (x.double() - exact)[sees]
        return difference.square().mean().sqrt().item(), difference.abs().max().item()

    rounding = errors(exact.to(dtype))
    slack = (3.0, 6.0) if dtype == torch.float32 else (1.5, 3.0)
    budget = [max(p, r) * s for p, r, s in zip(errors(peer), rounding, slack, strict=True)]
    if value.centre is not None and dtype == torch.float32:
        # The sum over what is left of V, to which the centre is added, is about as large as the centre; the result,
        # here, is nearly zero. Rotations (a step for each power of two) round it too.
        steps = 2 + (int(math.log2(value_dim)) if get_format(value_format).rotated else 0)
        budget = [b + steps * 2.0**-24 * float(value.centre.abs().max()) for b in budget]
    for got, allowed, what in zip(errors(actual), budget, ("rms", "largest"), strict=True):
        assert got <= allowed, (
            f"{what} error {got:.3g}, allowed {allowed:.3g}; SDPA {errors(peer)}, rounding {rounding}"
        )
    return actual


@pytest.mark.parametrize("dtype", [BF16, *wide(FP16, FP32)])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_in_every_format(name, dtype):
    check_attention(name, dtype=dtype, length=70)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "nvfp4"])
def test_attention_in_the_other_query_dtypes(name, dtype):
    check_attention(name, dtype=dtype, head_dim=96, length=40)


LENGTHS = [1, 15, 16, 17, 63, 129, 1000]


@pytest.mark.parametrize(
    "length, name",
    [
        *itertools.product(LENGTHS[:6], ["nvfp4"]),
        *wide(*in_turns(LENGTHS, turns=("fp4_mx_block16", "nvfp4"))),
        *wide(*in_turns(LENGTHS, turns=("bf16", "fp8_e4m3", "fp8_e5m2"))),
    ],
)
def test_attention_at_every_length(length, name):
    # Room for many more slots: most splits get none.
    check_attention(name, length=length, max_len=length + 300)


GROUPS = [1, 3, 7, 8, 4, 16, 20, 71]


@pytest.mark.parametrize(
    "group, name",
    [
        *itertools.product(GROUPS[:4], ["fp8_e4m3"]),
        *wide(*in_turns(GROUPS, turns=("nvfp4", "fp4_mx_block16"))),
        *wide(*in_turns(GROUPS, turns=("bf16", "fp8_e4m3"))),
    ],
)
def test_attention_with_every_group(group, name):
    check_attention(name, group=group, length=50)


HEAD_DIMS = [80, 96, 112, 128, 160, 256, 512, 16, 32, 48, 64, 144, 176, 192, 208, 224, 240, 272, 384]


@pytest.mark.parametrize(
    "name, head_dim, query_len",
    [
        *itertools.product(["nvfp4"], HEAD_DIMS[:7], [1]),
        *wide(*in_turns(("bf16", "fp8_e4m3", "nvfp4", "fp4_mx_block16"), HEAD_DIMS, turns=(1, 3, 40))),
    ],
)
def test_attention_with_every_head_dim(name, head_dim, query_len):
    check_attention(name, head_dim=head_dim, length=50, query_len=query_len, is_causal=True)


@pytest.mark.parametrize(
    "key_format, value_format, head_dim, value_dim",
    [
        ("fp8_e4m3", "nvfp4", 64, 64),
        ("nvfp4", "bf16", 80, 128),
        ("fp8_e4m3", "nvfp4", 192, 128),
        ("nvfp4", "fp8_e4m3", 112, 160),
        ("int8", "nvfp4", 80, 128),
        ("fp8_e4m3", "int8", 64, 96),
        *wide(
            ("bf16", "nvfp4", 192, 128),
            ("nvfp4", "nvfp4", 192, 128),
            ("fp4_mx_block16", "fp8_e5m2", 128, 64),
            ("fp8_e4m3", "test_mx_block32", 128, 96),
            ("test_nvfp4_block32", "fp4_mx_block16", 256, 16),
        ),
    ],
)
def test_attention_with_formats_and_widths_of_their_own(key_format, value_format, head_dim, value_dim):
    check_attention(key_format, value_format, head_dim=head_dim, value_dim=value_dim, length=50)


CHUNKS = [(5, 5), (5, 70), (33, 70), (64, 64), (100, 1000), (1000, 1000), (17, 4000)]


@pytest.mark.parametrize(
    "query_len_and_length, name",
    [
        *itertools.product(CHUNKS[:3], ["nvfp4"]),
        *wide(*in_turns(CHUNKS, turns=("nvfp4", "fp4_mx_block16"))),
        *wide(*in_turns(CHUNKS, turns=("fp8_e4m3", "bf16"))),
    ],
)
def test_attention_of_a_causal_chunk(query_len_and_length, name):
    query_len, length = query_len_and_length
    check_attention(name, query_len=query_len, length=length, is_causal=True, group=3)


PAIRED = ("fp8_e4m3", "nvfp4", "fp4_mx_block16", "mxfp4", "int8", "bf16")


@pytest.mark.parametrize("keep", [0, 12])
@pytest.mark.parametrize("head_dim", [64, *wide(32, 128, 256)])
@pytest.mark.parametrize(
    "key_format, value_format",
    [("fp8_e4m3", "nvfp4"), *wide(*(p for p in itertools.product(PAIRED, PAIRED) if p != ("fp8_e4m3", "nvfp4")))],
)
def test_attention_of_a_chunk_in_every_pair_of_formats(key_format, value_format, head_dim, keep):
    # Sizes that a CPU is quick enough for; on a GPU several rounds of the loop, in programs that share an SM.
    size = {"query_len": 18, "length": 70} if DEVICE == "cpu" else {"query_len": 40, "length": 997, "batch": 8}
    check_attention(key_format, value_format, head_dim=head_dim, is_causal=True, keep=keep, **size)


def masks(batch: int, heads: int, query_len: int, slots: int) -> dict[str, torch.Tensor]:
    """Masks of every kind for a test, by name."""
    full = torch.rand(batch, heads, query_len, slots) > 0.4
    padding = torch.arange(slots) >= torch.tensor([3, 40])[:batch, None]
    blind = full.clone()
    blind[0, 1, 0] = False
    blind[1, :, 1] = False
    random = torch.randn(batch, 1, query_len, slots)
    return {
        "left padding": padding[:, None, None],
        "left padding, expanded": padding[:, None, None].expand(batch, heads, query_len, slots),
        "every element": full,
        "rows that see nothing": blind,
        "all that counts is the first split": (torch.arange(slots) < 5)[None, None, None],
        "additive fp32": random.masked_fill(~full[:, :1], -torch.inf),
        "additive bf16": random.bfloat16().expand(-1, heads, -1, -1),
        "additive fp16, per head": torch.randn(1, heads, 1, slots).half(),
        "additive, least finite": torch.where(padding[:, None, None], 0.0, torch.finfo(FP32).min),
        "additive, all of a row the least finite": torch.full((1, 1, 1, slots), torch.finfo(FP32).min),
        "transposed": (torch.rand(batch, heads, slots, query_len) > 0.4).mT,
    }


MASKS = list(masks(2, 4, 2, 110))


@pytest.mark.parametrize(
    "kind, name",
    [*itertools.product(MASKS, ["fp8_e4m3"]), *wide(*in_turns(MASKS, turns=("bf16", "nvfp4", "fp8_e4m3")))],
)
def test_attention_with_every_mask(kind, name):
    check_attention(
        name, query_len=2, length=100, max_len=110, batch=2, group=2, mask=masks(2, 4, 2, 110)[kind]
    )  # fmt: skip


def chunk_masks(heads: int, query_len: int, slots: int) -> dict[str, torch.Tensor]:
    """Masks of a chunk of a prompt of which whole tiles change nothing, and whole tiles are hidden."""
    slot, position = torch.arange(slots), torch.arange(slots - query_len, slots)[:, None]
    causal = slot <= position
    hole = causal & ((slot < 120) | (slot >= 270))
    per_head = torch.stack([hole if head % 2 else causal for head in range(heads)])[None]
    blind = causal.clone()
    blind[:16] = False  # at least the first tile of rows of every configuration
    return {
        "causal": causal[None, None],
        "a window": (causal & (slot > position - 150))[None, None],
        "left padding": (causal & (slot >= torch.tensor([3, 140])[:, None, None]))[:, None],
        "a hole, in half of the heads": per_head,
        "rows that see nothing": blind[None, None],
        "additive, -inf": torch.zeros(query_len, slots).masked_fill(~hole, -torch.inf)[None, None],
        "additive, least finite": torch.where(causal, 0.0, torch.finfo(BF16).min).bfloat16()[None, None],
        "additive, per head": (torch.rand(heads)[:, None, None] * (slot - position)).where(causal, -torch.inf)[None],
        "one for all rows": (slot >= 140)[None, None, None],
    }


CHUNK_MASKS = list(chunk_masks(2, 40, 400))


@pytest.mark.parametrize(
    "kind, group, name",
    [
        *itertools.product(CHUNK_MASKS, [4], ["nvfp4"]),
        *wide(*in_turns(CHUNK_MASKS, (1, 3, 4), turns=("bf16", "nvfp4", "fp8_e4m3"))),
    ],
)
def test_attention_of_a_chunk_with_a_mask(kind, group, name):
    """More rows than a tile has: tiles of the mask that change nothing are not applied, hidden ends are not read."""
    query_len = 160 // group
    mask = chunk_masks(2 * group, query_len, 400)[kind]
    check_attention(name, query_len=query_len, length=390, max_len=400, batch=2, group=group, mask=mask)


def test_what_a_mask_hides_from_a_whole_chunk_is_not_read():
    key, value = (make_cache("fp8_e4m3", 1, 2, 400, 64, 390) for _ in range(2))
    query, positions = torch.randn(1, 8, 40, 64, dtype=BF16), torch.arange(350, 390)
    mask = (torch.arange(400) >= 256)[None, None, None]
    arguments = (positions, mask, 0.125, False, "fp8_e4m3", "fp8_e4m3")
    before = launch_attention(query, key, value, *arguments)
    for buffers in (key, value):
        buffers.codes[:, :, :256] = 0x7F  # NaN
    assert torch.equal(launch_attention(query, key, value, *arguments), before) and not before.isnan().any()


def test_a_mask_of_more_than_two_billion_elements():
    """Of a prompt's chunk over a long cache: as `as_strided` has it, 64 rows of 2**26 each."""
    key, value = (make_cache("fp8_e4m3", 1, 2, 64, 64, 64) for _ in range(2))
    query, positions = torch.randn(1, 4, 64, 64, dtype=BF16), torch.arange(64)
    zeros = np.zeros(64 << 26, bool)  # of which a CPU takes memory only where it is written
    large = torch.from_numpy(zeros).to(DEVICE).as_strided((1, 1, 64, 64), (0, 0, 1 << 26, 1))
    small = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.5
    large.copy_(small)
    outputs = [
        launch_attention(query, key, value, positions, mask, 0.125, False, "fp8_e4m3", "fp8_e4m3")
        for mask in (large, small)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_rows_that_see_nothing_but_sinks_in_several_shares(name):
    """Of a chunk: a whole tile of rows, for which the mask leaves no slot to read."""
    mask = torch.ones(1, 1, 8, 400, dtype=torch.bool)
    mask[:, :, :4] = False
    check_attention(
        name, query_len=8, length=390, max_len=400, batch=1, kv_heads=1, group=16, mask=mask,
        sinks=torch.linspace(-2, 3, 16),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "nvfp4"])
def test_what_is_kept_may_be_far_larger_than_the_rest(name):
    """First tokens are outliers; scales that were measured without them are not theirs."""
    fmt = get_format(name)
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(1)).mul(0.3).clamp(-0.9, 0.9)
    x[:, :, 0] *= 30
    buffers = fmt.allocate_like(x, scale=torch.tensor([1 / fmt.range, 1 / fmt.range]), keep=4)
    reference.write(buffers, fmt, x, torch.arange(40), keep_first=4)
    query, last = torch.randn(1, 2, 1, 64, dtype=FP16) / 8, torch.tensor([39])
    out = launch_attention(query, to_device(buffers), to_device(buffers), last, None, 0.125, False, name, name)
    decoded = reference.dequantize(buffers, fmt, torch.float64)
    exact = reference.attention(query.double(), decoded, decoded, last, None, 0.125, False)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=2e-3, atol=2e-3)


def test_attention_with_a_mask_and_causal():
    check_attention(query_len=2, length=100, max_len=110, batch=2, group=2, mask=masks(2, 4, 2, 110)["left padding"], is_causal=True)  # fmt: skip # noqa: E501


SOFTCAP_AND_SINKS = [(1.5, False), (0.0, True), (1.5, True)]
SHARES = [(40, 40), (150, 400), (4000, 4096)]  # length and slots; one share, several, many


@pytest.mark.parametrize(
    "name, softcap_and_sinks, dtype, length_and_slots",
    [
        *in_turns(("nvfp4", "fp8_e4m3"), SOFTCAP_AND_SINKS, [BF16], turns=SHARES[:2]),
        *wide(
            *in_turns(
                ("nvfp4", "fp8_e4m3", "bf16", "fp8_e5m2", "fp4_mx_block16"), SOFTCAP_AND_SINKS, DTYPES, turns=SHARES
            )
        ),
    ],
)
def test_attention_with_softcap_and_sinks(name, softcap_and_sinks, dtype, length_and_slots):
    (softcap, with_sinks), (length, max_len) = softcap_and_sinks, length_and_slots
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -2.0, 4.0, 1.0]).bfloat16() if with_sinks else None
    check_attention(
        name, dtype=dtype, length=length, max_len=max_len, group=3, query_scale=0.25, softcap=softcap, sinks=sinks
    )


@pytest.mark.parametrize(
    "kind, name",
    [
        *itertools.product(["left padding", "rows that see nothing", "additive fp32"], ["fp8_e4m3"]),
        *wide(("left padding", "bf16"), ("rows that see nothing", "nvfp4"), ("additive fp32", "nvfp4")),
    ],
)
def test_attention_with_softcap_sinks_and_a_mask(kind, name):
    mask = masks(2, 4, 2, 110)[kind]
    sinks = torch.linspace(-2, 3, 4)
    check_attention(
        name, query_len=2, length=100, max_len=110, batch=2, group=2, mask=mask, softcap=2.0, sinks=sinks,
        is_causal=kind == "left padding",
    )  # fmt: skip


@pytest.mark.parametrize("sink", [-1000.0, 1000.0])
@pytest.mark.parametrize("length, max_len", [(40, 40), (150, 400)])
def test_attention_with_a_sink_out_of_all_proportion(sink, length, max_len):
    key, value = (make_cache("fp8_e4m3", 1, 2, max_len, 64, length) for _ in range(2))
    query, last = torch.randn(1, 2, 1, 64, dtype=BF16), torch.tensor([length - 1])
    arguments = (query, key, value, last, None, 0.125, False, "fp8_e4m3", "fp8_e4m3")
    out = launch_attention(*arguments, sinks=torch.full((2,), sink, device=DEVICE))
    if sink < 0:
        assert torch.equal(out, launch_attention(*arguments))
    else:
        assert (out == 0).all()


@pytest.mark.parametrize("keep", [0, 6])
@pytest.mark.parametrize(
    "key_format, value_format",
    [
        ("fp8_e4m3+centred+rotated", "nvfp4+4over6"),
        ("nvfp4+centred+rotated+sweep", "nvfp4+centred"),
        ("int8+centred+rotated", "int8"),
        *wide(("nvfp4+rotated", "fp8_e4m3+centred+rotated"), ("fp4_mx_block16+centred", "bf16")),
    ],
)
def test_attention_undoes_transforms_and_reads_what_is_kept(key_format, value_format, keep):
    blind = masks(2, 4, 2, 110)["rows that see nothing"]
    for length in (100, 3):
        check_attention(
            key_format, value_format, query_len=2, length=length, max_len=110, batch=2, group=2, keep=keep,
            mask=blind,
        )  # fmt: skip
    check_attention(key_format, value_format, head_dim=96, query_len=20, length=33, is_causal=True, keep=keep)


@pytest.mark.parametrize(
    "name_and_keep, softcap_and_sinks, length_and_slots",
    in_turns(
        [("fp8_e4m3+centred+rotated", 0), ("nvfp4+centred", 4), ("nvfp4", 4)], SOFTCAP_AND_SINKS, turns=SHARES[:2]
    ),
)
def test_attention_with_softcap_and_sinks_over_transforms(name_and_keep, softcap_and_sinks, length_and_slots):
    """A centre shifts all scores of a row, which neither a softcap nor a sink bears."""
    (name, keep), (softcap, with_sinks), (length, max_len) = name_and_keep, softcap_and_sinks, length_and_slots
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -2.0, 4.0, 1.0]).bfloat16() if with_sinks else None
    check_attention(
        name, "nvfp4", length=length, max_len=max_len, group=3, query_scale=0.25, softcap=softcap, sinks=sinks,
        keep=keep, mask=(torch.arange(max_len) >= 3)[None, None, None],
    )  # fmt: skip


def test_attention_with_sinks_over_a_centred_value_is_refused():
    key, value = (make_cache(name, 1, 2, 40, 64, 40) for name in ("fp8_e4m3", "nvfp4+centred"))
    query, last = torch.randn(1, 2, 1, 64, dtype=BF16), torch.tensor([39])
    arguments = (last, None, 0.125, False, "fp8_e4m3", "nvfp4+centred")
    with pytest.raises(NotImplementedError, match="nvfp4.centred"):
        launch_attention(query, key, value, *arguments, sinks=torch.zeros(2, device=DEVICE))


def test_attention_of_rotated_values():
    check_attention("fp8_e4m3", "nvfp4+centred+rotated", head_dim=80, dtype=FP16, length=70)
    check_attention("bf16", "fp8_e4m3+rotated", query_len=2, length=40)


@pytest.mark.parametrize("query_scale", [2.0**-40, 2.0**60])
def test_attention_of_queries_outside_the_range_of_fp16(query_scale):
    check_attention("nvfp4", query_scale=query_scale)
    check_attention("fp8_e4m3", query_scale=query_scale)


def test_attention_keeps_many_small_probabilities():
    # One slot outweighs each of the others 2**20 times, and all of them together do not: fp16 must not lose them.
    length, fmt = 513, get_format("fp8_e4m3")
    key, value = (to_device(fmt.allocate(1, 1, length, 16, "cpu")) for _ in range(2))
    x = torch.zeros(1, 1, length, 16, device=DEVICE)
    x[0, 0, 0, 0] = 14.0
    v = torch.full_like(x, 448.0)
    v[0, 0, 0] = 0
    positions = torch.arange(length, device=DEVICE)
    reference.write(key, fmt, x, positions)
    reference.write(value, fmt, v, positions)
    query = torch.zeros(1, 1, 1, 16, dtype=FP32)
    query[..., 0] = 1.25
    out = launch_attention(query.half(), key, value, positions[-1:], None, 1.0, False, fmt.name, fmt.name)
    weight = 512 * 2.718281828459045**-17.5
    assert out.float().cpu() == pytest.approx(448 * weight / (1 + weight), rel=2e-3)


def test_attention_propagates_nan_of_a_stored_value():
    fmt = get_format("nvfp4")
    x = torch.randn(1, 2, 40, 64, device=DEVICE)
    key, value = (to_device(fmt.allocate(1, 2, 40, 64, "cpu")) for _ in range(2))
    positions = torch.arange(40, device=DEVICE)
    reference.write(value, fmt, x, positions)
    x[0, 1, 7, 3] = torch.nan
    reference.write(key, fmt, x, positions)
    query = torch.randn(1, 4, 1, 64, dtype=BF16)
    out = launch_attention(query, key, value, positions[-1:], None, 0.125, False, fmt.name, fmt.name)
    assert out[:, 2:].isnan().all() and not out[:, :2].isnan().any()


@pytest.mark.parametrize("query_len", [1, 40])
def test_attention_of_a_cache_that_runs_over_is_nan(query_len):
    key = make_cache("nvfp4", 1, 2, 100, 64, 100)
    value = make_cache("fp8_e4m3", 1, 2, 100, 64, 100)
    query = torch.randn(1, 4, query_len, 64, dtype=BF16)
    positions = torch.arange(101 - query_len, 101)
    for is_causal in (False, True):
        out = launch_attention(query, key, value, positions, None, 0.125, is_causal, "nvfp4", "fp8_e4m3")
        assert out.isnan().all()
    short_mask = torch.ones(1, 1, 1, 90, dtype=torch.bool)
    out = launch_attention(query, key, value, positions - 5, short_mask, 0.125, False, "nvfp4", "fp8_e4m3")
    assert out.isnan().all(), "a mask shorter than the cache is long"


def test_the_number_of_splits_fills_the_gpu_in_whole_rounds():
    from kvpass.kernels.attention import split_count

    assert 60 <= split_count(programs=8, slots=528, most=256) <= 66
    assert split_count(programs=256, slots=396, most=128) == 3
    assert split_count(programs=4096, slots=396, most=128) == 1
    assert split_count(programs=1, slots=528, most=2) == 2
    assert all(1 <= split_count(p, 396, most) <= most for p in (1, 7, 100, 395, 397, 900) for most in (1, 5, 256))


# --------------------------------------------------------------------------------------------------------------- errors


def test_unsupported_inputs_are_named():
    from kvpass.kernels.attention import attention
    from kvpass.kernels.dequantize import dequantize
    from kvpass.kernels.store import store

    fmt = get_format("nvfp4")
    buffers = fmt.allocate(1, 2, 40, 64, DEVICE)
    positions = torch.tensor([3], device=DEVICE)
    x = torch.zeros(1, 2, 1, 64, device=DEVICE)
    query = torch.zeros(1, 4, 1, 64, device=DEVICE)

    def attend(query=query, key=buffers, value=buffers, positions=positions, mask=None, formats=("nvfp4", "nvfp4")):
        attention(query, *key, *value, positions, mask, 0.125, False, *formats)

    for call, message in (
        (lambda: store(x.double(), x, positions, *buffers, *buffers, "nvfp4", "nvfp4"), "key is torch.float64"),
        (lambda: store(x, x[:, :1], positions, *buffers, *buffers, "nvfp4", "nvfp4"), "value is"),
        (lambda: store(x, x, positions, *buffers, *buffers, "nvfp4", "fp4_mx_block16"), "value_scale is given"),
        (lambda: dequantize(*buffers, positions, "nvfp4", torch.float64), "cannot dequantize to torch.float64"),
        (lambda: dequantize(*buffers._replace(block_scale=None), positions, "nvfp4", BF16), "block_scale is missing"),
        (lambda: dequantize(*buffers, positions, "nvfp4+centred", BF16), "cache_centre is missing"),
        (lambda: attend(query.double()), "query is torch.float64"),
        (lambda: attend(query[:, :3]), "a multiple of 2"),
        (lambda: attend(query[..., :32]), "this cache takes"),
        (lambda: attend(positions=torch.arange(2, device=DEVICE)), "positions hold 2 slots"),
        (lambda: attend(mask=torch.zeros(1, 3, 1, 40, device=DEVICE)), "mask is"),
        (lambda: attend(mask=torch.zeros(1, 1, 1, 40, device=DEVICE, dtype=torch.int32)), "mask is torch.int32"),
        (lambda: attend(value=fmt.allocate(1, 2, 41, 64, DEVICE)), "may differ in width only"),
        (lambda: attend(key=KVBuffers(buffers.codes.mT.contiguous().mT, *buffers[1:])), "must be contiguous"),
        (lambda: attend(formats=("nvfp4", "no_such")), "unknown KV format"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ------------------------------------------------------------------------------------------------------------- GPU only


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
class TestOnGpu:
    SHAPES = [
        dict(batch=4, kv_heads=8, length=4096),
        dict(length=20011, max_len=32768),
        dict(batch=64, length=300),
        dict(kv_heads=8, length=9000),
    ]

    @pytest.mark.parametrize("name, shape, dtype", in_turns(FORMATS, SHAPES, turns=DTYPES))
    def test_attention_at_larger_shapes_and_the_same_bits_again(self, name, shape, dtype):
        first, second = (self.attend_seeded(name, dtype, shape) for _ in range(2))
        assert torch.equal(first, second)

    @staticmethod
    def attend_seeded(name, dtype, shape):
        torch.manual_seed(1)
        return check_attention(name, dtype=dtype, head_dim=128, **shape)

    @pytest.mark.parametrize("name, query_len", in_turns(FORMATS, turns=(1, 3)))
    def test_a_captured_graph_follows_the_counter(self, name, query_len):
        from kvpass.kernels.attention import attention
        from kvpass.kernels.store import store

        fmt, kv_heads, head_dim, max_len = get_format(name), 4, 128, 3000
        buffers = [make_cache(name, 2, kv_heads, max_len, head_dim, 60) for _ in range(2)]
        positions = torch.arange(60, 60 + query_len, device=DEVICE)
        key, value = (torch.randn(2, kv_heads, query_len, head_dim, dtype=BF16, device=DEVICE) for _ in range(2))
        query = torch.randn(2, kv_heads * 4, query_len, head_dim, dtype=BF16, device=DEVICE)
        mask = torch.rand(2, 1, 1, max_len, device=DEVICE) > 0.1

        def step(key_buffers, value_buffers):
            store(key, value, positions, *key_buffers, *value_buffers, name, name)
            return attention(
                query, *key_buffers, *value_buffers, positions, mask, 0.1, True, fmt.name, fmt.name
            )  # fmt: skip

        eager_buffers = [clone(b) for b in buffers]
        step(*eager_buffers)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(*buffers)
        for jump in (0, 1, 1, 64, 500, 2000):
            positions += jump
            for tensor in (key, value, query):
                tensor.normal_()
            if jump > 1:  # what was skipped must hold something: fill both caches alike
                x = torch.randn(2, kv_heads, int(positions[0]), head_dim, device=DEVICE)
                for b in (*buffers, *eager_buffers):
                    reference.write(b, fmt, x, torch.arange(x.shape[2], device=DEVICE))
            expected = step(*eager_buffers)
            graph.replay()
            assert torch.equal(out, expected) and not out.isnan().any()
            for got, wanted in zip(buffers, eager_buffers, strict=True):
                assert_same_bytes(got, wanted)
        positions += max_len
        graph.replay()
        assert out.isnan().all()

    @pytest.mark.parametrize("name", FP4)
    def test_tiles_of_scales_do_not_touch_each_other(self, name):
        fmt = get_format(name)
        x = spread(2, 2, 5 * SCALE_TILE + 7, 128)
        check_store(x.bfloat16(), -x.bfloat16(), torch.arange(x.shape[2]), name, name, x.shape[2])
        assert fmt.block


def test_kernels_compile_for_a_gpu():
    import compile_only

    names, waiting, undefined, shared, spilled = compile_only.run(compile_only.__file__)
    kernels = [
        "_dequantize_kernel",
        "_learn_kernel",
        "_rotate_kernel",
        "_store_kernel",
        "attention_kernel",
        "reduce_kernel",
    ]
    assert names == [*kernels, "survey_kernel"]
    assert waiting == ["_rotate_kernel", "_store_kernel"]
    assert not undefined, "ptxas lost a register"
    assert shared <= 227 * 1024, "more than an H200 gives a program"
    assert not spilled


class TestSoundPtxas:
    CHUNK, DECODE = (Configuration(rows, 64, 4, 3, 2) for rows in (64, 16))

    @pytest.mark.parametrize("compiler, rows", [("taught", 64), (None, 32)])
    def test_rows_are_fewer_where_triton_has_none(self, compiler, rows, monkeypatch):
        monkeypatch.setattr(ptxas, "is_suspect", lambda: True)
        monkeypatch.setattr(ptxas, "_compiler", lambda: compiler)
        assert ptxas.compilable(self.CHUNK) == self.CHUNK._replace(block_m=rows)
        assert ptxas.compilable(self.DECODE) == self.DECODE
        monkeypatch.setattr(ptxas, "is_suspect", lambda: False)
        assert ptxas.compilable(self.CHUNK) == self.CHUNK

    def test_one_thread_takes_another_for_products_of_warpgroups(self, monkeypatch):
        compiler = pytest.importorskip("triton.backends.nvidia.compiler")
        ours = "/ptxas 12.8"
        monkeypatch.setattr(compiler, "get_ptxas", lambda arch: ours)
        monkeypatch.setattr(compiler, "get_ptxas_version", lambda arch: "12.8")
        monkeypatch.setattr(ptxas, "is_suspect", lambda: True)
        monkeypatch.setattr(ptxas, "_compiler", functools.cache(ptxas._compiler.__wrapped__))
        other = triton.knobs.nvidia.ptxas_blackwell
        elsewhere = []
        with pytest.raises(RuntimeError, match="as a launch may"), ptxas.sound(self.CHUNK) as options:
            thread = threading.Thread(target=lambda: elsewhere.append(compiler.get_ptxas(90)))
            thread.start()
            thread.join()
            assert (compiler.get_ptxas(90), elsewhere, bool(options)) == (other, [ours], True)
            raise RuntimeError("as a launch may")
        assert compiler.get_ptxas(90) == ours
        with ptxas.sound(self.DECODE) as options:
            assert (compiler.get_ptxas(90), options) == (ours, {})
