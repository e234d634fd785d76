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


def test_int8_by_hand():
    # amax 127 gives a scale of 1. Ties go to the even code.
    row = [127.0, -127.0, 0.5, 1.5, -2.5, 2.51, 126.5, 0.0, -0.4, 63.49, -63.51, 1.0, -1.0, 3.0, 4.0, 5.0]
    codes, scales = quantize_bytes(row, "int8")
    assert codes == [127, -127, 0, 2, -2, 3, 126, 0, 0, 63, -64, 1, -1, 3, 4, 5] and scales == [0x38]
    # The scale is rounded up, 130 / 127 to 1.125, so that nothing saturates; the tensor scale divides it.
    assert quantize_bytes([130.0, -13.0] * 8, "int8") == ([116, -12] * 8, [0x39])
    assert quantize_bytes([130.0, -13.0] * 8, "int8", scale=0.25) == ([116, -12] * 8, [0x49])
    assert quantize_bytes([127 * 449.0] * 16, "int8") == ([127] * 16, [0x7E])  # the largest scale
    assert quantize_bytes([127 * 2.0**-12] * 16, "int8") == ([16] * 16, [0x01])  # the least
    assert quantize_bytes([0.0, -0.0] * 8, "int8") == ([0] * 16, [0])
    assert quantize_bytes([INF, -INF] * 8, "int8") == ([127, -127] * 8, [0x7E])
    x = torch.ones(1, 1, 2, 16)
    x[..., 0, 3] = NAN
    back = round_trip(x, get_format("int8"))
    assert back[0, 0, 0].isnan().all() and ((back[0, 0, 1] - 1).abs() <= 0.5 * 2.0**-6 * 1.001).all()


def quantize_bytes(values, name, scale=1.0):
    """Signed codes and the scale's byte of one row of int8."""
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, 1, -1)
    codes, scales = reference.quantize(x, get_format(name), torch.tensor([scale]))
    return codes.view(torch.int8).flatten().tolist(), scales.flatten().tolist()


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


@pytest.mark.parametrize("name", [*format_names()[:5], "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_error_floor(name, head_dim):
    """Signal to noise of Gaussian values, against what the number of mantissa bits gives (6.02 dB a bit)."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 40, head_dim)
    error = round_trip(x, get_format(name)) - x
    sqnr = 10 * torch.log10(x.square().mean() / error.square().mean())
    floor = {"bf16": 53, "fp8_e4m3": 31, "fp8_e5m2": 25, "nvfp4": 20, "fp4_mx_block16": 18.5, "int8": 41}[name]
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


def test_mxfp4_block_by_hand():
    # amax 7 gives 2 ** (floor(log2(7)) - 2) = 1: what lies above 6 saturates, and ties go to the even code.
    row = [7.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -7.0, -0.25, 6.0, 0.0, -0.5, 1.0, 4.0, 4.99] + [0.0] * 16
    codes, scales = quantize_row(row, "mxfp4")
    assert codes[:16] == [7, 0, 2, 2, 4, 4, 6, 6, 8 | 7, 8, 7, 0, 8 | 1, 2, 6, 6]
    assert scales == [127]
    assert quantize_row([8.0] * 32, "mxfp4") == ([6] * 32, [128])  # exactly 4 times 2**1
    assert quantize_row([0.0] * 32, "mxfp4") == ([0] * 32, [0])


class TestSearch:
    def test_4over6_by_hand(self):
        # By amax / 6 = 1 the tens fives err by 1 each; by amax / 4 = 1.5 they are 4 * 1.5 - 1 and 6 is exact.
        row = [6.0] + [4.5] * 15
        assert quantize_row(row, "nvfp4") == ([7] + [6] * 15, [0x38])
        assert quantize_row(row, "nvfp4+4over6") == ([6] + [5] * 15, [0x3C])  # e4m3 of 1.5

    def test_4over6_keeps_the_rule_where_it_is_as_good(self):
        for row in ([6.0] * 16, [0.0] * 16, [6.0, 4.0, 3.0, 2.0] * 4):
            assert quantize_row(row, "nvfp4+4over6") == quantize_row(row, "nvfp4")

    def test_sweep_by_hand(self):
        # With the scale 1.125 the codes 6, 4 and 3 are exact; amax / 6 is 1.125 too, amax / 4 is not.
        row = [6.75, 4.5, 3.375] + [0.0] * 13
        assert quantize_row(row, "nvfp4+sweep") == quantize_row(row, "nvfp4")
        # Nothing but 5: any scale with 5 / scale in {4, 6, 3} is exact; the rule's 5 / 6 is not an e4m3 number.
        codes, scales = quantize_row([5.0] * 16, "nvfp4+sweep")
        assert (codes, scales) == ([6] * 16, [0x3A])  # 1.25, five codes above e4m3(5 / 6)

    def test_sweep_of_exponents(self):
        # amax 6.1 needs 2; by half of that all the ones and halves are exact, and 6.1 saturates to 6.
        row = [6.1] + [0.5, 1.0, -0.5] * 5
        assert quantize_row(row, "fp4_mx_block16")[1] == [128]
        codes, scales = quantize_row(row, "fp4_mx_block16+sweep")
        assert (codes, scales) == ([7] + [1, 2, 8 | 1] * 5, [127])

    def test_a_block_that_would_underflow_keeps_what_it_can(self):
        assert quantize_row([0.005, -0.005] * 8, "nvfp4+sweep") == ([1, 8 | 1] * 8, [5])  # 0.5 * 5 * 2**-9 = 0.0049
        assert quantize_row([0.0] * 16, "nvfp4+sweep") == ([0] * 16, [0])

    @pytest.mark.parametrize("name", ["nvfp4+4over6", "nvfp4+sweep", "fp4_mx_block16+sweep", "mxfp4+sweep"])
    def test_never_worse_than_the_rule_and_often_better(self, name):
        torch.manual_seed(0)
        x = torch.randn(2, 2, 64, 64) * torch.rand(64)
        errors = [
            (round_trip(x, get_format(n)) - x).double().square().unflatten(-1, (-1, get_format(n).block)).sum(-1)
            for n in (name, name.split("+")[0])
        ]
        assert (errors[0] <= errors[1] * 1.05).all()  # the search rounds values before it compares
        assert errors[0].sum() < 0.97 * errors[1].sum()

    @pytest.mark.parametrize("value", [NAN, INF])
    def test_special_values_end_as_without_a_search(self, value):
        row = [value, 1.0] + [0.5] * 14
        assert quantize_row(row, "nvfp4+sweep") == quantize_row(row, "nvfp4")


class TestRotation:
    @pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
    def test_is_symmetric_and_orthonormal(self, head_dim):
        matrix = reference.rotate(torch.eye(head_dim, dtype=torch.float64))
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
        assert torch.equal(matrix, matrix.T)

    def test_by_hand(self):
        signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).float()
        expected = torch.kron(signs, signs) / 4  # Sylvester's construction
        assert torch.equal(reference.rotate(torch.eye(16)), expected)
        twice = reference.rotate(torch.eye(48))  # three blocks of 16, since 48 is no power of two
        assert torch.equal(twice, torch.block_diag(expected, expected, expected))

    def test_spreads_an_outlier(self):
        x = torch.zeros(1, 1, 1, 64)
        x[..., 5] = 768.0
        assert (round_trip(x, get_format("fp8_e4m3")) - x).abs().max() == 768 - 448
        assert torch.equal(round_trip(x, get_format("fp8_e4m3+rotated")), x)  # 96 in each place


class TestCentring:
    @pytest.mark.parametrize("transforms", ["+centred", "+centred+rotated"])
    def test_any_centre_is_exact_but_for_the_rounding_of_codes(self, transforms):
        torch.manual_seed(0)
        x, offset = torch.randn(1, 2, 9, 64), 300 * torch.randn(2, 64)
        fmt = get_format("fp8_e4m3" + transforms)
        buffers = fmt.allocate(1, 2, 9, 64, "cpu", centre=offset)
        reference.write(buffers, fmt, x + offset[:, None], torch.arange(9))
        assert (reference.dequantize(buffers, fmt) - offset[:, None] - x).abs().max() < 0.2

    def test_softmax_does_not_see_the_centre_of_keys(self):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 2, 9, 32, dtype=torch.float64) for _ in range(3))
        centre = 20 * torch.randn(1, 2, 1, 32, dtype=torch.float64)
        arguments = torch.arange(9), None, 32**-0.5, True
        plain = reference.attention(query, key, value, *arguments)
        torch.testing.assert_close(reference.attention(query, key - centre, value, *arguments), plain)
        moved = reference.attention(query, key, value - centre, *arguments)
        torch.testing.assert_close(moved + centre, plain)
        rotated = reference.attention(reference.rotate(query), reference.rotate(key), value, *arguments)
        torch.testing.assert_close(rotated, plain)


def test_kept_slots_read_back_as_bf16():
    fmt, x = get_format("nvfp4+centred+rotated"), torch.randn(1, 2, 9, 64)
    buffers = fmt.allocate(1, 2, 16, 64, "cpu", centre=torch.full((2, 64), 5.0), keep=4)
    codes = fmt.allocate(1, 2, 16, 64, "cpu", centre=torch.full((2, 64), 5.0))
    for stored in (buffers, codes):
        reference.write(stored, fmt, x, torch.arange(9), keep_first=3)
    error = (reference.dequantize(buffers, fmt)[:, :, :9] - x).abs()
    assert error[:, :, [0, 1, 2, 8]].max() < 0.06 and error[:, :, 3:8].mean() > 0.1
    assert torch.equal(buffers.codes, codes.codes)  # the quantized copy is there as well
    assert torch.equal(reference.dequantize(buffers.first(2), fmt), reference.dequantize(buffers, fmt)[:, :, :2])


@pytest.mark.parametrize("keep_first, keep_last, max_len", [(0, 8, 40), (4, 8, 70), (4, 0, 40), (3, 5, 9), (4, 8, 10)])
@pytest.mark.parametrize("is_ring", [False, True])
def test_what_is_kept_is_what_the_slots_hold(keep_first, keep_last, max_len, is_ring):
    """Pieces of any length, some of them taken back: no row is of another token than its slot's, and the newest are
    kept, those after a crop as far as they were."""
    if is_ring and keep_last:
        max_len = keep_first + -(-(max_len - keep_first) // keep_last) * keep_last
    fmt, generator = get_format("nvfp4"), torch.Generator().manual_seed(max_len)
    buffers = fmt.allocate(1, 1, max_len, 16, "cpu", keep=keep_first + keep_last)
    whole = fmt.allocate(1, 1, max_len, 16, "cpu", keep=0)
    truth, length, certain = torch.zeros(max_len, 16), 0, 0  # tokens since something was taken back
    for _ in range(60):
        piece = int(torch.randint(1, 13, (1,), generator=generator))
        piece = min(piece, max_len if is_ring else max_len - length)
        if not piece or int(torch.randint(4, (1,), generator=generator)) == 0:
            back = min(int(torch.randint(0, 6, (1,), generator=generator)), length)
            length, certain = length - back, 0
            continue
        slots = torch.arange(length, length + piece) % max_len
        truth[slots] = x = torch.randn(piece, 16, generator=generator).bfloat16().float()
        for stored in (buffers, whole):
            reference.write(stored, fmt, x[None, None], slots, keep_first)
        length, certain = length + piece, certain + piece
        held = buffers.kept_slots[buffers.kept_slots >= 0].long()
        assert len(held.unique()) == len(held)
        decoded, codes = (reference.dequantize(b, fmt)[0, 0] for b in (buffers, whole))
        is_held = torch.zeros(max_len, dtype=torch.bool)
        is_held[held] = True
        assert torch.equal(decoded, torch.where(is_held[:, None], truth, codes))
        wanted = [*range(min(length, keep_first, max_len)), *range(max(0, length - min(keep_last, certain)), length)]
        newest_wrap_the_first = is_ring and keep_first  # whose slots have rows of their own
        assert newest_wrap_the_first or set(slot % max_len for slot in wanted) <= set(held.tolist())
