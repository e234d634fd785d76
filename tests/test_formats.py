"""The registry, and what a row says about storage."""

import pytest
import torch

from kvpass.formats import SCALE_ORDER, KVFormat, format_names, get_format, register_format


def test_known_formats():
    assert format_names()[:5] == ("bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx_block16")


@pytest.mark.parametrize(
    ("name", "bits", "nbytes"),
    [("bf16", 16, 384), ("fp8_e4m3", 8, 192), ("fp8_e5m2", 8, 192), ("nvfp4", 4.5, 108), ("fp4_mx_block16", 4.5, 108)],
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
        ({"codec": "e3m2"}, "unknown codec 'e3m2'; known: bf16, e4m3, e5m2, e2m1"),
        ({"codec": "e2m1"}, "e2m1 needs a block scale"),
        ({"codec": "e4m3", "block_scale": "e4m3", "block": 16}, "the wider codecs take none"),
        ({"codec": "e2m1", "block_scale": "e8m0", "block": 64}, "block is 64; allowed: 16, 32"),
        ({"codec": "e2m1", "block_scale": "e5m2", "block": 16}, "block_scale is 'e5m2'; allowed"),
        ({"codec": "e2m1", "block_scale": "e8m0", "block": 16, "tensor_scale": True}, "drop tensor_scale"),
        ({"codec": "bf16", "tensor_scale": True}, "drop tensor_scale"),
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
