"""The Hopper decode kernel against an fp64 oracle on the same bytes, and what it refuses.

Every slot past the length holds 0xFF, a NaN as fp8 code and as block scale, so anything that leaks shows.
"""

import json

import compile_only
import pytest
import torch
import torch.nn.functional as F
from compile_only import only_compile, spilled_bytes
from products import in_turns

from kvpass import ops, reference
from kvpass.formats import KVBuffers, get_format

pytest.importorskip("triton")
hopper_decode = pytest.importorskip("kvpass.kernels.hopper_decode")
hopper_kernels = pytest.importorskip("kvpass.kernels.hopper_kernels")
attention = pytest.importorskip("kvpass.kernels.attention").attention  # goes there, with the rotations around it

ON_HOPPER = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and hopper_decode.TRITON in hopper_decode.TESTED_TRITON
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU and a tested triton")]
hopper = lambda test: gpu[0](gpu[1](test))  # noqa: E731


def make_buffers(name, batch, kv_heads, max_len, head_dim, length, device, keep=0):
    """Buffers of ``max_len`` slots, random K or V in the first ``length``, 0xFF in all others. Of the ``keep`` slots, a
    third are the first, the others the newest."""
    fmt = get_format(name)
    buffers = fmt.allocate(batch, kv_heads, max_len, head_dim, "cpu", keep=keep)
    for tensor in (buffers.codes, buffers.block_scale):
        if tensor is not None:
            tensor.fill_(0xFF)
    if buffers.scale is not None:
        buffers.scale.uniform_(0.25, 2.0)
    if buffers.centre is not None:
        buffers.centre.normal_()
    if buffers.kept is not None:
        buffers.kept.fill_(torch.nan)
    spread = torch.randint(-3, 3, (batch, kv_heads, length, head_dim // 16, 1)).float().exp2()
    x = (torch.randn(batch, kv_heads, length, head_dim // 16, 16) * spread).flatten(-2)
    reference.write(buffers, fmt, x, torch.arange(length), (keep + 2) // 3)
    return KVBuffers(*(None if t is None else t.to(device) for t in buffers))


class Case:
    """One call: query, buffers and mask, the oracle's answer and the budget for the error."""

    def __init__(
        self, key="nvfp4", value=None, dtype=torch.bfloat16, batch=2, kv_heads=2, group=4, head_dim=128,
        length=77, max_len=None, query_length=1, causal=False, mask=None, softcap=0.0, sinks=None, keep=0,
    ):  # fmt: skip
        torch.manual_seed(length + group + head_dim)
        self.formats = key, value or key
        self.causal, self.scale = causal, head_dim**-0.5
        self.extras = {"softcap": softcap, "sinks": None if sinks is None else sinks.cuda()}
        max_len = max_len or length + 19
        self.key = make_buffers(self.formats[0], batch, kv_heads, max_len, head_dim, length, "cuda", keep)
        self.value = make_buffers(self.formats[1], batch, kv_heads, max_len, head_dim, length, "cuda", keep)
        self.query = torch.randn(batch, kv_heads * group, query_length, head_dim, device="cuda").to(dtype)
        self.positions = torch.arange(length - query_length, length, device="cuda")
        self.mask = mask(batch, kv_heads * group, query_length, max_len, length).cuda() if mask else None

    def run(self):
        arguments = (self.query, *self.key, *self.value, self.positions, self.mask, self.scale, self.causal)
        assert hopper_decode.supports(*arguments, *self.formats, **self.extras) is None
        torch.full((1 << 22,), torch.nan, device="cuda")  # what the allocator hands out next is poisoned
        return attention(*arguments, *self.formats, **self.extras)

    def oracle(self):
        """The exact answer, and the relative error torch makes on the same K and V in the dtype of the query."""
        k, v = (
            reference.dequantize(b, get_format(f), torch.float64)
            for b, f in zip((self.key, self.value), self.formats, strict=True)
        )
        arguments = (self.positions, self.mask, self.scale, self.causal)
        exact = reference.attention(self.query.double(), k, v, *arguments, **self.extras)
        end = int(self.positions[-1]) + 1
        group = self.query.shape[1] // k.shape[1]
        k, v = (x[:, :, :end].to(self.query.dtype).repeat_interleave(group, 1) for x in (k, v))
        bias, visible = 0.0, torch.ones(self.query.shape[2], end, dtype=torch.bool, device="cuda")
        if self.causal:
            visible = torch.arange(end, device="cuda") <= self.positions[:, None]
        if self.mask is not None and self.mask.dtype == torch.bool:
            visible = visible & self.mask[..., :end]
        elif self.mask is not None:
            bias = self.mask[..., :end].float()
        bias = bias + torch.zeros(visible.shape, device="cuda").masked_fill(~visible, -torch.inf)
        if softcap := self.extras["softcap"]:
            scores = self.query.float() @ k.float().mT * self.scale
            bias = bias + softcap * torch.tanh(scores / softcap) - scores
        if (sinks := self.extras["sinks"]) is not None:  # a last slot whose value is zero
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            rows = (*self.query.shape[:3], 1)
            bias = torch.cat([bias.expand(*rows[:3], end), sinks.float()[:, None, None].expand(rows)], -1)
        torch_answer = F.scaled_dot_product_attention(
            self.query, k, v, attn_mask=bias.to(self.query.dtype), scale=self.scale
        )
        return exact, relative(torch_answer, exact)

    def check(self):
        exact, torch_error = self.oracle()
        error = relative(self.run(), exact)
        budget = 1.5 * torch_error + torch.finfo(self.query.dtype).eps / 4
        assert error <= budget, f"relative error {error:.2e}, budget {budget:.2e} (torch: {torch_error:.2e})"


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


def left_padding(batch, heads, query_length, max_len, length):
    """[batch, 1, 1, max_len]: row b hides its first 5 + 37 b slots."""
    hidden = torch.arange(batch).view(-1, 1, 1, 1) * 37 + 5
    return torch.arange(max_len) >= hidden.clamp(max=length - 1)


def scattered(batch, heads, query_length, max_len, length):
    mask = torch.rand(batch, 1, 1, max_len) > 0.5
    mask[..., length - 1] = True
    return mask


def expanded(batch, heads, query_length, max_len, length):
    return left_padding(batch, heads, query_length, max_len, length).expand(batch, heads, query_length, max_len)


def of_every_row(batch, heads, query_length, max_len, length):
    mask = torch.rand(batch, heads, query_length, max_len) > 0.5
    mask[..., 0] = True
    return mask


def added(batch, heads, query_length, max_len, length):
    """As "eager" models have it: nothing, or the smallest finite number."""
    hidden = torch.finfo(torch.bfloat16).min
    return torch.where(left_padding(batch, heads, query_length, max_len, length), 0.0, hidden).bfloat16()


def added_biases(batch, heads, query_length, max_len, length):
    """A bias for every row and slot, some of it -inf."""
    bias = 3 * torch.randn(batch, heads, query_length, max_len)
    return bias.masked_fill(~of_every_row(batch, heads, query_length, max_len, length), -torch.inf)


def alibi(batch, heads, query_length, max_len, length):
    slopes = torch.exp2(-torch.arange(heads).float()).half()
    return slopes[None, :, None, None] * (torch.arange(max_len) - length).half()


def strided(batch, heads, query_length, max_len, length):
    """Slots are not next to each other."""
    return left_padding(batch, heads, query_length, 2 * max_len, length)[..., ::2]


@hopper
@pytest.mark.parametrize(
    "format, length, dtype",
    in_turns(
        ("nvfp4", "fp8_e4m3", "int8"),
        (1, 15, 16, 17, 31, 32, 33, 63, 1000, 4096),
        turns=(torch.float16, torch.bfloat16),
    ),
)
def test_lengths(format, length, dtype):
    Case(format, dtype=dtype, length=length).check()


@hopper
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_groups(group):
    Case(group=group, length=300).check()


@hopper
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nvfp4", "nvfp4"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3", "nvfp4"),
        ("nvfp4", "fp8_e4m3"), ("fp4_mx_block16", "fp4_mx_block16"), ("fp8_e4m3", "fp4_mx_block16"),
        ("int8", "int8"), ("int8", "nvfp4"), ("fp4_mx_block16", "int8"),
    ],
)  # fmt: skip
def test_formats(key, value, head_dim):
    Case(key, value, head_dim=head_dim, length=333).check()


@hopper
@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("key", ["mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize(("length", "mask"), [(31, None), (333, None), (333, left_padding), (4096, None)])
def test_blocks_of_32(key, head_dim, length, mask):
    Case(key, "mxfp4", head_dim=head_dim, length=length, mask=mask, batch=2).check()


@hopper
@pytest.mark.parametrize("mask", [left_padding, scattered, expanded, of_every_row, strided, added, added_biases, alibi])
@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3", "fp4_mx_block16", "int8"])
def test_masks(format, mask):
    Case(format, batch=3, length=200, mask=mask).check()


def hidden_slots(length):
    return 0, 40, length // 3 + 100, length - 70, length - 1, length


def long_padding(batch, heads, query_length, max_len, length):
    return torch.arange(max_len) >= torch.tensor(hidden_slots(length))[:, None, None, None]


def added_long_padding(*shape):
    return torch.where(long_padding(*shape), 0.0, torch.finfo(torch.bfloat16).min).bfloat16()


@hopper
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize(
    ("format", "mask", "options"),
    [
        ("nvfp4", long_padding, {}),
        ("fp8_e4m3", long_padding, {}),
        ("fp8_e4m3", added_long_padding, {}),
        ("nvfp4+centred+rotated+4over6", long_padding, {"keep": 12}),
        ("nvfp4+rotated", long_padding, {"keep": 12, "head_dim": 96}),
        ("int8", long_padding, {"softcap": 1.5}),
        ("int8", added_long_padding, {"sinks": torch.linspace(-2, 3, 8)}),
        ("fp8_e4m3", long_padding, {"query_length": 3, "causal": True}),
        ("nvfp4", long_padding, {"length": 9000}),
    ],
)
def test_long_padding_is_shared_out_and_not_read(monkeypatch, format, mask, options, splits):
    monkeypatch.setattr(hopper_decode, "split_count", lambda *args: splits)
    options = {"length": 3000} | options
    case, length = Case(format, batch=6, mask=mask, **options), options["length"]
    case.check()
    before = case.run()
    for row, hidden in enumerate(hidden_slots(length)):
        tiles = min(hidden // 32, (length + 31) // 32 - splits)  # each share has a tile, be it hidden
        case.value.codes[row, :, : 32 * tiles] = 0xFF
        if case.value.block_scale is not None:
            case.value.block_scale[row, :, :tiles] = 0xFF
    assert before.isfinite().all() and torch.equal(case.run(), before)


@hopper
@pytest.mark.parametrize(("query_length", "group"), [(2, 4), (4, 3), (5, 8), (8, 16)])
@pytest.mark.parametrize("causal", [True, False])
def test_several_query_tokens(query_length, group, causal):
    Case(query_length=query_length, group=group, length=150, causal=causal).check()
    Case("fp8_e4m3", query_length=query_length, group=group, length=150, causal=causal, mask=of_every_row).check()
    Case("int8", query_length=query_length, group=group, length=150, causal=causal, mask=of_every_row).check()
    Case("int8", query_length=query_length, group=group, length=150, causal=causal, mask=left_padding).check()


@hopper
@pytest.mark.parametrize(
    "format, mask, softcap_and_sinks, shape",
    in_turns(
        ("nvfp4", "fp8_e4m3", "fp4_mx_block16", "int8"),
        (None, left_padding, of_every_row, added, added_biases),
        ((1.5, False), (0.0, True), (1.5, True)),
        turns=((20, 1, 128), (333, 1, 64), (4000, 3, 128), (77, 2, 256)),
    ),
)
def test_softcap_and_sinks(format, mask, softcap_and_sinks, shape):
    (softcap, with_sinks), (length, query_length, head_dim) = softcap_and_sinks, shape
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -2.0, 8.0, 1.0, 0.0, -1.0]).bfloat16() if with_sinks else None
    Case(
        format, length=length, query_length=query_length, head_dim=head_dim, mask=mask, causal=True, softcap=softcap,
        sinks=sinks,
    ).check()  # fmt: skip


@hopper
@pytest.mark.parametrize("sink", [-1000.0, 1000.0])
def test_a_sink_out_of_all_proportion(sink):
    case = Case(length=300)
    without = case.run()
    case.extras["sinks"] = torch.full((8,), sink, device="cuda")
    if sink < 0:
        assert torch.equal(case.run(), without)
    else:
        assert (case.run() == 0).all()


@hopper
def test_query_of_any_strides():
    case = Case(query_length=4, causal=True)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    case.check()


@hopper
@pytest.mark.parametrize("length", [32, 1000])
def test_long_cache_that_is_mostly_empty(length):
    Case(batch=1, length=length, max_len=40000).check()


@hopper
def test_every_e8m0_exponent_is_exact():
    case = Case("fp8_e4m3", "fp4_mx_block16", length=1, batch=1, kv_heads=1, max_len=32)
    for bits in (0, 1, 2, 100, 127, 200, 252):
        case.value.block_scale.fill_(bits)
        torch.testing.assert_close(case.run().double(), case.oracle()[0], rtol=2**-8, atol=0)
    case.value.block_scale.fill_(255)
    assert case.run().isnan().all()


@hopper
def test_hidden_rows_are_zero():
    case = Case(batch=2, length=100, mask=left_padding)
    case.mask[1] = False
    out = case.run()
    assert (out[1] == 0).all() and (out[0] != 0).any()


@hopper
@pytest.mark.parametrize("mask", [None, left_padding, added_biases])
def test_position_past_the_cache_gives_nan(mask):
    case = Case(length=64, max_len=64, mask=mask)
    case.positions += 1
    assert case.run().isnan().all()


@hopper
def test_nan_within_the_length_shows():
    case = Case("fp8_e4m3", length=64)
    case.value.codes[0, 0, 10] = 0x7F
    out = case.run()
    assert out[0, 0].isnan().all() and out[1].isfinite().all()


@hopper
def test_same_bits_every_time():
    case = Case(batch=4, length=3000, mask=left_padding)
    first = case.run()
    for _ in range(20):
        assert torch.equal(case.run(), first)


@hopper
@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3", "int8"])
def test_replay_follows_the_counter(format):
    """One captured graph serves every length: positions is read on the device."""
    case = Case(format, length=300, max_len=320)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments = (case.query, *case.key, *case.value, case.positions, None, case.scale, False)
        out = attention(*arguments, *case.formats)
    for position in (0, 1, 31, 32, 100, 299):
        case.positions.fill_(position)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, case.run())
        exact, torch_error = case.oracle()
        assert relative(out, exact) <= 1.5 * torch_error + torch.finfo(out.dtype).eps / 4


@hopper
@pytest.mark.parametrize("length", [3, 70])
@pytest.mark.parametrize(
    ("key", "value", "keep"),
    [
        ("nvfp4", "nvfp4", 0),
        ("fp8_e4m3", "fp8_e4m3", 3),
        ("nvfp4+centred+rotated+4over6", "nvfp4+4over6", 0),
        ("fp8_e4m3+centred+rotated", "nvfp4+4over6", 3),
        ("nvfp4+rotated", "nvfp4+centred+rotated", 3),
    ],
)
def test_kernels_that_are_launched_early_wait_for_each_other(key, value, keep, length):
    """Layers of nothing but store and attention, each of which takes what the one before it gave: in a graph no other
    kernel runs between them. Without waiting for the device after each, they give the same bits."""
    case = [Case(key, value, length=length, max_len=128, keep=keep) for _ in range(8)]
    position, given = torch.tensor([length], device="cuda"), torch.empty(2, 8, 1, 128, device="cuda").bfloat16()

    def layers(x, wait):
        for layer in case:
            k, v = x[:, :2], x[:, 2:4]
            ops.store(k, v, position, *layer.key, *layer.value, *layer.formats, min(keep, 1))
            wait()
            x = ops.attention(x, *layer.key, *layer.value, position, None, 2.0, False, *layer.formats)
            wait()
        return x

    layers(given, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(given, lambda: None)
    for seed in range(100):
        torch.manual_seed(seed)
        given.normal_()
        graph.replay()
        found = out.clone()
        assert found.isfinite().all() and torch.equal(found, layers(given, torch.cuda.synchronize))


@hopper
@pytest.mark.parametrize("keep", [0, 1, 4, 40])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp8_e4m3+centred+rotated", "nvfp4+4over6"),
        ("nvfp4+centred+rotated+sweep", "nvfp4+sweep"),
        ("nvfp4+centred", "fp8_e4m3+centred+rotated"),
        ("fp4_mx_block16+rotated", "nvfp4+centred"),
        ("int8+centred+rotated", "nvfp4+4over6"),
        ("int8+rotated", "int8+centred"),
    ],
)
def test_transforms_and_kept_slots(key, value, keep):
    for length in (3, 33, 500):
        Case(key, value, length=length, keep=keep).check()
        Case(key, value, length=length, keep=keep, head_dim=64, group=3, mask=left_padding).check()
        Case(key, value, length=length, keep=keep, head_dim=96, group=1).check()
        Case(key, value, length=length, keep=keep, head_dim=80, mask=left_padding).check()
    Case(key, value, length=300, query_length=3, causal=True, keep=keep).check()
    Case(key, value, length=300, query_length=2, mask=of_every_row, keep=keep, head_dim=256).check()


@hopper
def test_rows_that_see_nothing_are_zero_with_a_centre_too():
    case = Case("nvfp4", "nvfp4+centred", length=100, keep=4)
    case.mask = torch.ones(2, 1, 1, 119, dtype=torch.bool, device="cuda")
    case.mask[1] = False
    out = case.run()
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.parametrize(
    ("length", "causal", "masked", "splits", "dim"),
    [
        (20, False, False, 1, 64),
        (3, False, False, 5, 64),
        (7, True, True, 1, 96),
        (70, False, True, 2, 96),
        (150, True, False, 4, 64),
    ],
)
def test_the_combination_weighs_kept_slots_and_adds_centre_and_sinks(monkeypatch, length, causal, masked, splits, dim):
    """The second kernel alone, in triton's interpreter, with parts worked out here."""
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.skip("needs triton's interpreter")
    monkeypatch.setattr(hopper_kernels.tl.extra.cuda, "gdc_wait", lambda *args, **kwargs: None)
    torch.manual_seed(0)
    batch, kv_heads, group, tokens, keep = 2, 2, 2, 2, 4
    rows, scale, unpacked = group * tokens, 0.125, 2.0**14
    key, value = torch.randn(2, batch, kv_heads, length, dim)
    kept_key, kept_value = (torch.full((batch, kv_heads, keep, dim), torch.nan).bfloat16() for _ in range(2))
    kept_slots = torch.tensor([0, 1, length - 1, -1 if length < 4 else 2], dtype=torch.int32)
    is_kept = torch.zeros(length, dtype=torch.bool)
    for row, slot in enumerate(kept_slots.tolist()):
        for kept, x in ((kept_key, key), (kept_value, value)) if slot >= 0 else ():
            kept[:, :, row] = x[:, :, slot] = x[:, :, slot].bfloat16().float()
            is_kept[slot] = True
    query = torch.randn(batch, kv_heads * group, tokens, dim)
    centre, tensor_scale = torch.randn(kv_heads, dim), torch.tensor([0.5, 2.0])
    positions = torch.arange(length - tokens, length)
    mask = torch.rand(batch, 1, tokens, length) > 0.4
    mask[..., 0], mask[0, 0, 1] = True, False
    mask = mask if masked else torch.ones_like(mask)

    scores = query.unflatten(1, (kv_heads, group)) @ key[:, :, None].mT * (scale * 1.4426950408889634)
    visible = mask[:, None] & (torch.arange(length) <= positions[:, None] if causal else True)
    scores = scores.masked_fill(~visible | is_kept, -torch.inf).flatten(2, 3)  # of what the first kernel sees
    width = triton.next_power_of_2(dim)
    parts = torch.full((batch, kv_heads, splits, rows, width), torch.nan)
    statistics = torch.full((batch, kv_heads, splits, rows, 2), torch.nan)
    tiles = torch.arange((length + 31) // 32).tensor_split(min(splits, (length + 31) // 32))
    for split, share in enumerate(tiles):  # of which the first are a tile larger; what no share is for stays NaN
        part = scores.masked_fill(~torch.isin(torch.arange(length) // 32, share), -torch.inf)
        largest = part.amax(-1).clamp(min=-1e30)
        p = torch.exp2(part - largest[..., None])
        parts[:, :, split, :, :dim] = p @ value / (unpacked * tensor_scale.view(-1, 1, 1))
        statistics[:, :, split] = torch.stack([largest, p.sum(-1)], -1)
    sees = visible[:, :, 0].any(-1, keepdim=True)  # of each batch row and query token
    shift = centre.repeat_interleave(group, 0)[None, :, None] * sees
    for sinks, given, added in ((None, centre, shift), (torch.linspace(-2, 3, kv_heads * group), None, 0.0)):
        out = torch.full((batch, kv_heads * group, tokens, dim), torch.nan)
        hopper_kernels.combine_kernel[(batch * kv_heads * rows, dim // 32)](
            parts, statistics, out, tensor_scale, given, sinks, positions, 160, splits, kv_heads, unpacked,
            query, kept_key, kept_value, kept_slots, mask if masked else None, scale, *query.stride()[:3],
            mask.stride(0), 0, mask.stride(2), mask.stride(3),
            QUERY_LENGTH=tokens, ROWS=rows, HEAD_DIM=width, HELD=dim,
            BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_DIM=32, TENSOR_SCALE=True,
            CAUSAL=causal, KEEP=keep, KEEP_AT_ONCE=2,
        )  # fmt: skip
        expected = reference.attention(query, key, value, positions, mask, scale, causal, 0.0, sinks)
        torch.testing.assert_close(out, expected + added, rtol=1e-4, atol=1e-5)


def shapes(**changes):
    """Arguments of ``supports_shapes``, on the CPU."""
    head_dim = changes.get("head_dim", 128)
    key, value = get_format(changes.get("key", "nvfp4")), get_format(changes.get("value", changes.get("key", "nvfp4")))
    query = torch.empty(1, changes.get("group", 4), changes.get("query_length", 1), head_dim, dtype=torch.bfloat16)
    query = query.to(changes.get("dtype", torch.bfloat16))
    return query, 1, head_dim, changes.get("mask"), changes.get("scale", 1.0), key, value


def test_supported_shapes():
    assert hopper_decode.supports_shapes(*shapes()) is None
    assert hopper_decode.supports_shapes(*shapes(group=16, query_length=8, head_dim=256)) is None
    assert hopper_decode.supports_shapes(*shapes(key="mxfp4", head_dim=96)) is None
    assert hopper_decode.supports_shapes(*shapes(mask=torch.ones(1, 1, 1, 32, dtype=torch.bool))) is None
    assert hopper_decode.supports_shapes(*shapes(mask=torch.zeros(1, 1, 1, 32))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "query is torch.float32"),
        ({"key": "bf16"}, "codec bf16"),
        ({"key": "fp4_mx_block16", "dtype": torch.float16}, "computes in bfloat16"),
        ({"key": "mxfp4", "head_dim": 64}, "has blocks of 32"),
        ({"head_dim": 48}, "head_dim 48"),
        ({"head_dim": 272}, "head_dim 272"),
        ({"group": 17}, "GQA group of 17"),
        ({"query_length": 9}, "9 query tokens"),
        ({"mask": torch.zeros(1, 1, 1, 32, dtype=torch.int32)}, "mask is torch.int32"),
        ({"mask": torch.zeros(1, 1, 32)}, "mask is torch.float32 of 3 dimensions"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_refused_shapes(changes, reason):
    assert reason in hopper_decode.supports_shapes(*shapes(**changes))


def test_refuses_a_mask_that_is_shorter_than_the_cache():
    query, codes = torch.empty(1, 4, 1, 128, dtype=torch.bfloat16), torch.empty(1, 1, 64, 64, dtype=torch.uint8)
    masks = [torch.ones(1, 1, 1, slots, dtype=torch.bool) for slots in (63, 64)]
    reasons = [hopper_decode._supports_memory(query, mask, codes) for mask in masks]
    assert reasons == ["the mask covers 63 slots of 64", None]


def test_refuses_what_is_not_a_hopper_gpu():
    reason = hopper_decode.supports_device(torch.device("cpu"))
    assert reason is not None and ("9.0" in reason or "triton" in reason)


@pytest.mark.parametrize(
    ("name", "heads", "max_len", "splits"),
    [
        ("nvfp4", 256, 8192, 6),  # 11.6 programs a multiprocessor of the 12 that are wanted
        ("nvfp4", 8, 131072, 198),
        ("nvfp4", 400, 8192, 5),  # three would leave a scheduler of four idle
        ("nvfp4", 800, 8192, 5),  # in two waves
        ("fp8_e4m3", 256, 8192, 4),
        ("fp8_e4m3", 8, 131072, 132),
        ("fp8_e4m3", 8, 1024, 16),  # shares of two tiles
        ("fp8_e4m3", 1, 32, 1),
        ("fp8_e4m3", 4000, 8192, 1),
    ],
)
def test_split_count(name, heads, max_len, splits):
    fmt = get_format(name)
    assert hopper_decode.split_count(heads, max_len, hopper_decode.capacity(128, fmt, fmt, 128, 132)) == splits


def test_splits_never_leave_most_of_a_device_idle():
    fmts = [get_format(name) for name in ("fp8_e4m3", "nvfp4")]
    for device in (hopper_decode.capacity(128, fmt, fmt, 128, 132) for fmt in fmts):
        resident, wanted = device.resident * 132, device.wanted * 132
        for heads in range(1, 3000):
            splits = hopper_decode.split_count(heads, 1 << 20, device)
            waves = -(-heads * splits // resident)
            assert splits >= 1 and (heads * splits >= 0.5 * wanted if waves == 1 else waves <= 4), heads


def test_nothing_is_reserved_for_more_programs_than_are_wanted():
    fmt = get_format("fp8_e4m3")
    device, program = hopper_decode.capacity(128, fmt, fmt, 128, 132), hopper_decode._program_bytes(128, fmt, fmt)
    wanted = device.wanted * device.multiprocessors
    reserved = [hopper_decode.reserved_kilobytes(program, device, count) for count in (wanted, wanted + 1)]
    assert reserved[0] > 0 and reserved[1] == 0


COMPILED_SHAPES = [
    # format, head_dim, batch, max_len, GQA group, shape of the mask, softcap and sinks and an added mask, slots kept
    ("nvfp4", 128, 32, 8192, 4, None, False, 0),
    ("nvfp4", 128, 32, 8192, 4, (32, 1, 1, 8192), False, 0),
    ("nvfp4", 64, 1, 4096, 3, (1, 1, 1, 4096), False, 0),
    ("nvfp4", 128, 1, 131072, 8, None, False, 0),
    ("nvfp4", 128, 32, 8192, 4, (32, 1, 1, 8192), True, 0),
    ("fp8_e4m3", 128, 32, 8192, 4, None, False, 0),
    ("fp8_e4m3", 128, 32, 8192, 4, (32, 1, 1, 8192), False, 0),
    ("fp8_e4m3", 64, 1, 4096, 3, None, False, 0),
    ("fp8_e4m3", 128, 32, 8192, 4, (32, 1, 1, 8192), True, 0),
    ("nvfp4+centred+rotated+sweep", 128, 32, 8192, 4, (32, 1, 1, 8192), False, 4),
    ("fp8_e4m3+centred+rotated", 128, 1, 131072, 4, None, False, 0),
    ("int8", 128, 32, 8192, 4, (32, 1, 1, 8192), False, 12),
    ("int8+rotated", 64, 1, 4096, 3, None, False, 0),
    ("int8", 128, 32, 8192, 4, (32, 1, 1, 8192), True, 0),
    ("nvfp4+rotated", 96, 8, 8192, 1, None, False, 12),
    ("fp8_e4m3", 96, 8, 8192, 1, (8, 1, 1, 8192), False, 0),
    ("fp8_e4m3", 192, 8, 8192, 2, None, False, 0),
    ("nvfp4", 80, 8, 8192, 1, None, False, 0),
]


def compile_without_gpu() -> None:
    """Take `COMPILED_SHAPES` through the launcher; print the bytes of spills, and how many programs have room in the
    shared memory of a multiprocessor beside how many are wanted."""
    compiled = only_compile({hopper_decode: ("decode_kernel", "combine_kernel")})
    hopper_decode._device = lambda index: ((9, 0), 132)
    spilled, room = [], []
    for name, head_dim, batch, max_len, group, mask_shape, capped, keep in COMPILED_SHAPES:
        compiled.clear()
        buffers = get_format(name).allocate(batch, 8, max_len, head_dim, "meta", keep=keep)
        dtype = torch.float32 if get_format(name).rotated else torch.bfloat16
        query = torch.empty(batch, 8 * group, 1, head_dim, dtype=dtype, device="meta")
        positions = torch.empty(1, dtype=torch.int64, device="meta")
        mask = mask_shape and torch.empty(mask_shape, dtype=torch.bfloat16 if capped else torch.bool, device="meta")
        sinks = torch.empty(8 * group, dtype=torch.bfloat16, device="meta") if capped else None
        extras = {"softcap": 50.0 if capped else 0.0, "sinks": sinks}
        hopper_decode.attention(query, *buffers, *buffers, positions, mask, 1.0, False, name, name, **extras)
        spilled.append([spilled_bytes(kernel.asm["cubin"]) for kernel in compiled])
        fmt, program = get_format(name), compiled[0].metadata.shared + hopper_decode.SHARED_BYTES_PER_PROGRAM
        wanted = hopper_decode.capacity(1 << (head_dim - 1).bit_length(), fmt, fmt, 128, 132).wanted
        room.append((min(16, hopper_decode.SHARED_BYTES // program), wanted))
    print(json.dumps([spilled, room]))


@pytest.mark.skipif(
    hopper_decode.TRITON not in (*hopper_decode.TESTED_TRITON, "3.9"),
    reason="compiles with the tested triton and with 3.9",
)
def test_main_shapes_compile_without_spills_and_with_room_for_as_many_programs_as_are_wanted():
    spilled, room = compile_only.run(__file__)
    assert spilled == [[0, 0]] * len(COMPILED_SHAPES)
    assert all(fit == wanted for fit, wanted in room), room


if __name__ == "__main__":
    compile_without_gpu()
