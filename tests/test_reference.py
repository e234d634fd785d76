"""The specification, against values worked out by hand."""

import math

import pytest
import torch

from kvpass import reference
from kvpass.formats import KVFormat, format_names, get_format

NAN, INF = math.nan, math.inf


def quantize_row(values, name, scale=1.0):
    """Codes (as nibbles for fp4) and block scale bytes of one row of head_dim values."""
    fmt = get_format(name)
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, 1, -1)
    factor = torch.tensor([scale]) if fmt.tensor_scale else None
    codes, block_scale = reference.quantize(x, fmt, factor)
    codes = codes.flatten().tolist()
    if fmt.block:
        codes = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
        block_scale = block_scale.flatten().tolist()
    return codes, block_scale


def round_trip(x, fmt, scale=None):
    buffers = fmt.allocate(*x.shape, device=x.device)
    if scale is not None:
        buffers.scale.copy_(scale)
    reference.write(buffers, fmt, x, torch.arange(x.shape[2]))
    return reference.dequantize(buffers, fmt)


def test_nvfp4_block_by_hand():
    # amax 6 gives a block scale of 1, so codes are the e2m1 values themselves. Ties: .25 -> 0, .75 -> 1, 1.25 -> 1,
    # 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4 (to the even code).
    row = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.3, -0.76, -6.0, 0.2499, 0.2501, 4.9, 5.1, 0.0]
    codes, scales = quantize_row(row, "nvfp4")
    assert codes == [7, 0, 2, 2, 4, 4, 6, 6, 8 | 1, 8 | 2, 8 | 7, 0, 1, 6, 7, 0]
    assert scales == [0x38]  # e4m3 of 1.0


def test_nvfp4_global_scale_divides_the_block_scale():
    codes, scales = quantize_row([3.0] * 16, "nvfp4", scale=0.25)
    assert (codes, scales) == ([7] * 16, [0x40])  # 3 / 6 / 0.25 = 2.0


def test_nvfp4_block_scale_that_underflows_makes_zeros():
    codes, scales = quantize_row([0.005, -0.005] * 8, "nvfp4")  # 0.005 / 6 is below half of e4m3's least, 2**-9
    assert (codes, scales) == ([0] * 16, [0])


def test_fp4_mx_block_by_hand():
    # amax 6 gives 2**0; ties go away from zero.
    row = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.2499, 0.0, 4.99, -5.0, 2.49, 1.74, 0.74]
    codes, scales = quantize_row(row, "fp4_mx_block16")
    assert codes == [7, 1, 2, 3, 4, 5, 6, 7, 8 | 1, 8, 0, 6, 8 | 7, 4, 3, 1]
    assert scales == [127]


@pytest.mark.parametrize(
    ("amax", "byte"), [(0.0, 94), (6.0, 127), (6.0000005, 128), (3.0, 126), (12.0, 128), (1e-30, 94), (INF, 254)]
)
def test_fp4_mx_exponent_is_exact_at_powers_of_two(amax, byte):
    assert quantize_row([amax] + [0.0] * 15, "fp4_mx_block16")[1] == [byte]


@pytest.mark.parametrize(
    ("name", "value", "byte"),
    [
        ("fp8_e4m3", 448.0, 0x7E),
        ("fp8_e4m3", 1e6, 0x7E),
        ("fp8_e4m3", -INF, 0xFE),
        ("fp8_e4m3", 2.0**-9, 0x01),
        ("fp8_e4m3", 2.0**-10, 0x00),  # tie between 0 and the least subnormal: to even
        ("fp8_e4m3", NAN, 0x7F),
        ("fp8_e5m2", 57344.0, 0x7B),
        ("fp8_e5m2", INF, 0x7B),
        ("fp8_e5m2", NAN, 0x7F),
    ],
)
def test_fp8_by_hand(name, value, byte):
    assert quantize_row([value] * 16, name)[0] == [byte] * 16


def test_fp8_scale_divides_on_the_way_in_and_multiplies_on_the_way_back():
    fmt, x = get_format("fp8_e4m3"), torch.full((1, 2, 1, 16), 900.0)
    back = round_trip(x, fmt, torch.tensor([1.0, 4.0]))
    assert back[0, 0].unique().tolist() == [448.0]  # saturated
    assert back[0, 1].unique().tolist() == [896.0]  # 225 rounds to 224


@pytest.mark.parametrize("name", ["nvfp4", "fp4_mx_block16"])
def test_nan_in_fp4_marks_its_block_and_no_other(name):
    x = torch.full((1, 1, 1, 32), 6.0)
    x[..., 3] = NAN
    back = round_trip(x, get_format(name)).flatten()
    assert back[:16].isnan().all() and torch.equal(back[16:], x.flatten()[16:])


def test_infinity_saturates_nvfp4_and_survives_e8m0():
    x = torch.full((1, 1, 1, 16), -INF)
    assert round_trip(x, get_format("nvfp4")).unique().tolist() == [-448.0 * 6]
    assert round_trip(x, get_format("fp4_mx_block16")).unique().tolist() == [-INF]


@pytest.mark.parametrize("name", format_names()[:5])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_error_floor(name, head_dim):
    """Signal to noise of Gaussian values, against what the number of mantissa bits gives (6.02 dB a bit)."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 40, head_dim)
    error = round_trip(x, get_format(name)) - x
    sqnr = 10 * torch.log10(x.square().mean() / error.square().mean())
    floor = {"bf16": 53, "fp8_e4m3": 31, "fp8_e5m2": 25, "nvfp4": 20, "fp4_mx_block16": 18.5}[name]
    assert floor < sqnr < floor + 5


def test_every_slot_of_a_tile_has_its_own_scale():
    fmt = get_format("fp4_mx_block16")
    x = (2.0 ** torch.arange(40.0)).view(1, 1, 40, 1) * torch.tensor([1.0, 2.0**-50]).repeat_interleave(16)
    assert torch.equal(round_trip(x * 6, fmt)[..., :16], x[..., :16] * 6)
    buffers = fmt.allocate(1, 1, 40, 32, "cpu")
    reference.write(buffers, fmt, x * 6, torch.arange(40))
    rows = reference.scale_rows(buffers.block_scale, 40)
    assert rows[0, 0, :, 0].tolist() == list(range(127, 167))


@pytest.mark.parametrize("name", format_names()[:5])
def test_interchange_round_trip(name):
    fmt, x = get_format(name), torch.randn(2, 3, 37, 64)
    source, target = (fmt.allocate(2, 3, 40, 64, "cpu") for _ in range(2))
    reference.write(source, fmt, x, torch.arange(37))
    codes, scales = reference.to_interchange(source, 37)
    assert codes.shape == (2, 3, 37, fmt.code_width(64))
    assert (scales is None) == (fmt.block == 0) and (scales is None or scales.shape == (2, 3, 37, 4))
    reference.from_interchange(target, codes, scales)
    assert torch.equal(reference.dequantize(source, fmt), reference.dequantize(target, fmt))
    with pytest.raises(ValueError, match="codes are"):
        reference.from_interchange(target, codes[:1], scales)


def test_rows_of_quantize_are_the_interchange_rows():
    fmt, x = get_format("nvfp4"), torch.randn(1, 2, 5, 32)
    buffers = fmt.allocate(1, 2, 64, 32, "cpu")
    reference.write(buffers, fmt, x, torch.arange(5))
    assert all(map(torch.equal, reference.to_interchange(buffers, 5), reference.quantize(x, fmt, buffers.scale)))


def test_a_new_row_needs_nothing_else():
    fmt = KVFormat("unregistered_mxfp4", "e2m1", block_scale="e8m0", block=32)
    x = torch.randn(1, 2, 3, 64)
    assert (round_trip(x, fmt) - x).norm() < 0.2 * x.norm()


@pytest.mark.parametrize("masked", ["none", "bool", "additive", "causal"])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_is_sdpa_over_the_valid_slots(masked, group):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2 * group, 4, 32), torch.randn(2, 2, 24, 32), torch.randn(2, 2, 24, 48)
    k[:, :, 20:], v[:, :, 20:] = NAN, NAN
    positions, mask, causal = torch.arange(16, 20), None, masked == "causal"
    allowed = torch.ones(2, 1, 4, 24, dtype=torch.bool)
    if masked in ("bool", "additive"):
        allowed = torch.rand(2, 1, 4, 24) > 0.3
        mask = allowed if masked == "bool" else torch.where(allowed, 0.0, -INF)
    if causal:
        allowed = (torch.arange(24) <= positions[:, None]).expand(2, 1, 4, 24)
    out = reference.attention(q, k, v, positions, mask, 0.2, causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :20], v[:, :, :20], attn_mask=allowed[..., :20], scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)


def test_a_row_that_sees_nothing_is_zero_and_nan_is_not_hidden():
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 3, 16)
    mask = torch.tensor([[False] * 3, [True] * 3]).view(1, 1, 2, 3)
    out = reference.attention(q, k, k, torch.tensor([1, 2]), mask, 1.0, False)
    assert (out[0, 0, 0] == 0).all() and (out[0, 0, 1] != 0).all()
    k[0, 0, 0] = NAN
    assert reference.attention(q, k, k, torch.tensor([1, 2]), mask, 1.0, False)[0, 0, 1].isnan().all()
