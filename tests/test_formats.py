"""The registry, and what a row says about storage."""

import pytest
import torch

from kvpass.formats import SCALE_ORDER, KVFormat, format_names, get_format, register_format, rotation_block


def test_known_formats():
    assert format_names()[:6] == ("bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx_block16", "mxfp4")


@pytest.mark.parametrize(
    ("name", "bits", "nbytes"),
    [
        ("bf16", 16, 384),
        ("fp8_e4m3", 8, 192),
        ("fp8_e5m2", 8, 192),
        ("nvfp4", 4.5, 108),
        ("fp4_mx_block16", 4.5, 108),
        ("mxfp4", 4.25, 102),
    ],
)
def test_storage_of_three_heads_of_64(name, bits, nbytes):
    fmt = get_format(name)
    buffers = fmt.allocate(2, 3, 96, 64, "cpu")
    assert fmt.bits_per_value == bits
    assert buffers.nbytes == 2 * 96 * nbytes == 2 * 96 * fmt.bytes_per_token(3, 64)
    assert fmt.head_dim(buffers.codes.shape[-1]) == 64
    assert (buffers.scale is not None) == (name in ("fp8_e4m3", "fp8_e5m2", "nvfp4"))


def test_unknown_name_says_what_is_known_and_what_is_near():
    with pytest.raises(ValueError, match=r"unknown KV format 'nvfp'; known: bf16, .*Did you mean 'nvfp4'\?"):
        get_format("nvfp")


def test_registering_again():
    row = register_format(KVFormat("test_mxfp4", "e2m1", block_scale="e8m0", block=32))
    assert register_format(KVFormat("test_mxfp4", "e2m1", block_scale="e8m0", block=32)) == row
    with pytest.raises(ValueError, match="'test_mxfp4' is registered already"):
        register_format(KVFormat("test_mxfp4", "e2m1", block_scale="e8m0", block=16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": "e3m2"}, "unknown codec 'e3m2'; known: bf16, e4m3, e5m2, int8, e2m1"),
        ({"codec": "e2m1"}, "e2m1 and int8 need a block scale"),
        ({"codec": "e4m3", "block_scale": "e4m3", "block": 16}, "the other codecs take none"),
        ({"codec": "int8"}, "e2m1 and int8 need a block scale"),
        (
            {"codec": "int8", "block_scale": "e4m3", "block": 16},
            "int8, and nothing else, takes e4m3 scales of the whole",
        ),
        (
            {"codec": "int8", "block_scale": "e8m0", "block": 512},
            "int8, and nothing else, takes e4m3 scales of the whole",
        ),
        (
            {"codec": "e2m1", "block_scale": "e4m3", "block": 512},
            "'e2m1' with 'e4m3' scales of blocks of 512; int8, and",
        ),
        (
            {"codec": "int8", "block_scale": "e4m3", "block": 512, "search": "sweep"},
            r"\+sweep chooses block scales of e2m1, not of int8",
        ),
        ({"codec": "e2m1", "block_scale": "e8m0", "block": 64}, "block is 64; allowed: 16, 32"),
        ({"codec": "e2m1", "block_scale": "e5m2", "block": 16}, "block_scale is 'e5m2'; allowed"),
        ({"codec": "e2m1", "block_scale": "e8m0", "block": 16, "tensor_scale": True}, "drop tensor_scale"),
        ({"codec": "bf16", "tensor_scale": True}, "drop tensor_scale"),
        (
            {"codec": "e2m1", "block_scale": "e4m3", "block": 16, "scale_rule": "floor"},
            "scale_rule is 'floor'; allowed",
        ),
        ({"codec": "e2m1", "block_scale": "e4m3", "block": 16, "search": "all"}, "search is 'all'; allowed"),
    ],
)
def test_impossible_rows(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVFormat("impossible", **arguments)


@pytest.mark.parametrize("head_dim", [8, 72, 528])
def test_head_dim_that_does_not_fit(head_dim):
    with pytest.raises(ValueError, match=f"cannot hold head_dim {head_dim}: it must be a multiple of 16"):
        get_format("nvfp4").allocate(1, 1, 32, head_dim, "cpu")


def test_scale_order_is_a_permutation():
    assert sorted(SCALE_ORDER) == list(range(32))
    assert SCALE_ORDER[0b00001] == 0b01000 and SCALE_ORDER[0b10000] == 0b00100  # b0 and b4 of the slot


def test_views_of_the_first_slots():
    buffers = get_format("nvfp4").allocate(1, 2, 96, 64, "cpu")
    first = buffers.first(33)
    assert first.codes.shape[2] == 33 and first.block_scale.shape[2] == 2
    assert first.codes.data_ptr() == buffers.codes.data_ptr()
    assert torch.equal(first.scale, buffers.scale)


class TestDerivedRows:
    @pytest.mark.parametrize("order", [("centred", "rotated", "sweep"), ("sweep", "centred", "rotated")])
    def test_suffixes_in_any_order_are_one_row(self, order):
        fmt = get_format("+".join(("nvfp4", *order)))
        assert fmt.name == "nvfp4+centred+rotated+sweep"
        assert (fmt.centred, fmt.rotated, fmt.search) == (True, True, "sweep")
        assert fmt == get_format(fmt.name) and fmt.bits_per_value == 4.5
        assert fmt.untransformed == get_format("nvfp4+sweep")
        assert fmt.name not in format_names()

    def test_of_a_users_own_row(self):
        register_format(KVFormat("test_own", "e2m1", block_scale="e4m3", block=32, centred=True))
        assert get_format("test_own+rotated") == KVFormat(
            "test_own+rotated", "e2m1", block_scale="e4m3", block=32, centred=True, rotated=True
        )
        with pytest.raises(ValueError, match=r"'test_own\+centred': \+centred comes on top of another centred"):
            get_format("test_own+centred")
        with pytest.raises(ValueError, match="what follows a '\\+' is derived from a base row"):
            register_format(KVFormat("test_own+mine", "e4m3"))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nvfp5+sweep", r"unknown KV format 'nvfp5\+sweep'; known: bf16"),
            ("nvfp4+centered", r"suffix of format 'nvfp4', 'centered'; known: centred, .*Did you mean 'centred'\?"),
            ("nvfp4+", "suffix of format 'nvfp4', ''; known: centred, rotated, 4over6, sweep"),
            ("bf16+rotated", r"bf16 is stored as is; it takes neither \+centred nor \+rotated"),
            ("fp8_e4m3+sweep", r"\+sweep chooses block scales of e2m1, not of e4m3"),
            ("fp4_mx_block16+4over6", r"use \+sweep"),
            ("nvfp4+sweep+4over6", r"\+4over6 comes on top of another search"),
            ("nvfp4+sweep+sweep", r"\+sweep comes on top of another search"),
        ],
    )
    def test_what_means_nothing(self, name, message):
        with pytest.raises(ValueError, match=message):
            get_format(name)

    def test_a_centre_of_another_shape(self):
        with pytest.raises(ValueError, match=r"a centre of shape \[64\] for a layer of 2 KV heads of 64 values"):
            get_format("nvfp4+centred").allocate(1, 2, 32, 64, "cpu", centre=torch.zeros(64))

    def test_fields_are_the_buffers_that_exist(self):
        for name, keep in (("bf16", 4), ("fp8_e4m3", 0), ("fp8_e4m3+centred", 4), ("mxfp4+rotated", 2)):
            buffers = get_format(name).allocate(1, 2, 32, 64, "cpu", keep=keep)
            assert get_format(name).fields(keep) == [f for f in buffers._fields if getattr(buffers, f) is not None]


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (128, 128), (256, 256), (80, 16), (96, 32), (192, 64)])
def test_rotation_block(head_dim, block):
    assert rotation_block(head_dim) == block
