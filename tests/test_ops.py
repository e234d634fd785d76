"""The operators' schemas, and that they compute the specification."""

import pytest
import torch

from kvpass import ops, reference
from kvpass.formats import format_names, get_format

PAIRS = [(name, name) for name in format_names()[:5]] + [
    ("fp8_e4m3", "nvfp4"),
    ("nvfp4", "bf16"),
    ("fp8_e4m3+centred+rotated", "nvfp4+4over6"),
    ("nvfp4+sweep", "mxfp4+centred+rotated"),
]


def filled(key_format, value_format, device, length=33, slots=40, heads=3, dim=64):
    """Buffers of K and V with `length` tokens stored, and those tokens."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, heads, length, dim, device=device)
    key, value = (get_format(f).allocate(2, heads, slots, dim, device, keep=4) for f in (key_format, value_format))
    for buffers in (key, value):
        if buffers.centre is not None:
            buffers.centre.normal_()
    ops.store(k, v, torch.arange(length, device=device), *key, *value, key_format, value_format, 2)
    return k, v, key, value


@pytest.mark.parametrize(("key_format", "value_format"), PAIRS)
def test_opcheck(key_format, value_format, device):
    k, v, key, value = filled(key_format, value_format, device)
    positions, formats = torch.tensor([33, 34], device=device), (key_format, value_format)
    torch.library.opcheck(ops.store, (k[:, :, :2], v[:, :, :2], positions, *key, *value, *formats))
    torch.library.opcheck(ops.dequantize, (*key, positions, key_format, torch.bfloat16))
    centre, turns = torch.zeros(3, 64, device=device), torch.randn(34, 16, 2, device=device)
    learnt = (torch.ones(3, device=device), centre, None, centre.clone() if get_format(value_format).centred else None)
    torch.library.opcheck(
        ops.learn, (k, v, *learnt, turns, torch.arange(33, device=device) < 30, True, False, *formats)
    )
    query = torch.randn(2, 6, 2, 64, device=device, dtype=torch.bfloat16)
    mask = torch.ones(2, 1, 2, 40, device=device, dtype=torch.bool)
    arguments = (query, *key, *value, positions, mask, 0.125, True, *formats)
    torch.library.opcheck(ops.attention, arguments)
    sinks = torch.randn(6, device=device, dtype=torch.bfloat16)
    sinks = {} if get_format(value_format).centred else {"sinks": sinks}  # which a centred V cannot have
    torch.library.opcheck(ops.attention, arguments, {"softcap": 5.0, **sinks})


def test_attention_is_for_inference(device):
    """Gradients that are not there are an error, where they are asked for."""
    _, _, key, value = filled("fp8_e4m3", "nvfp4", device)
    query = torch.randn(2, 6, 1, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    last, formats = torch.tensor([32], device=device), ("fp8_e4m3", "nvfp4")
    out = ops.attention(query, *key, *value, last, None, 0.125, False, *formats)
    with pytest.raises(NotImplementedError, match="for inference"):
        out.sum().backward()


@pytest.mark.parametrize(("key_format", "value_format"), PAIRS)
def test_store_and_dequantize_are_the_specification(key_format, value_format, device):
    k, v, key, value = filled(key_format, value_format, device)
    for x, buffers, name in ((k, key, key_format), (v, value, value_format)):
        x = reference.transform(x, get_format(name), buffers.centre)
        codes, scales = reference.quantize(x, get_format(name), buffers.scale)
        stored_codes, stored_scales = reference.to_interchange(buffers, 33)
        assert torch.equal(stored_codes, codes)
        assert scales is None or torch.equal(stored_scales, scales)
        decoded = ops.dequantize(*buffers, torch.tensor([32], device=device), name, torch.float32)
        assert torch.equal(decoded[:, :, :33], reference.dequantize(buffers, get_format(name))[:, :, :33])
        assert (decoded[:, :, 33:] == 0).all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "fp4_mx_block16"])
def test_slots_past_the_newest_token_are_not_read(name, device):
    _, _, key, value = filled(name, name, device)
    query, last = torch.randn(2, 3, 1, 64, device=device), torch.tensor([32], device=device)
    before = ops.attention(query, *key, *value, last, None, 0.125, False, name, name)
    for buffers in (key, value):
        buffers.codes[:, :, 33:] = 0xFF
        if buffers.block_scale is not None:
            buffers.block_scale[:, :, 1, :, [reference.SCALE_ORDER[s] for s in range(1, 32)]] = 0xFF
    assert torch.equal(ops.attention(query, *key, *value, last, None, 0.125, False, name, name), before)
    assert (ops.dequantize(*key, last, name, torch.float32)[:, :, 33:] == 0).all()


@pytest.mark.parametrize(
    ("softcap", "sinks", "message"),
    [
        (-1.0, None, "softcap is -1.0; it must be positive, or 0 for none"),
        (float("nan"), None, "softcap is nan"),
        (0.0, torch.zeros(3), r"sinks are torch.float32 of shape \(3,\); give a floating number for each of 6 heads"),
        (0.0, torch.zeros(6, dtype=torch.int64), "sinks are torch.int64"),
    ],
)
def test_softcaps_and_sinks_that_are_refused(softcap, sinks, message, device):
    _, _, key, value = filled("nvfp4", "nvfp4", device)
    query, last = torch.randn(2, 6, 1, 64, device=device), torch.tensor([32], device=device)
    sinks = None if sinks is None else sinks.to(device)
    with pytest.raises(ValueError, match=message):
        ops.attention(query, *key, *value, last, None, 0.125, False, "nvfp4", "nvfp4", softcap, sinks)


def test_a_position_past_the_end():
    k, v, key, value = filled("nvfp4", "nvfp4", "cpu")
    before = key.codes.clone()
    with pytest.raises(ValueError, match="position 40 does not fit a cache of 40 slots"):
        ops.store(k[:, :, :1], v[:, :, :1], torch.tensor([40]), *key, *value, "nvfp4", "nvfp4")
    assert torch.equal(key.codes, before)


@pytest.mark.gpu
def test_a_position_past_the_end_on_a_gpu_is_nan_and_writes_nothing():
    k, v, key, value = filled("nvfp4", "nvfp4", "cuda")
    before, position = key.codes.clone(), torch.tensor([40], device="cuda")
    ops.store(k[:, :, :1], v[:, :, :1], position, *key, *value, "nvfp4", "nvfp4")
    assert torch.equal(key.codes, before)
    query = torch.randn(2, 3, 1, 64, device="cuda")
    assert ops.attention(query, *key, *value, position, None, 0.125, False, "nvfp4", "nvfp4").isnan().all()


def test_a_released_buffer_has_no_data():
    with pytest.raises(RuntimeError, match="quantized by the kvquant backend and holds no bf16 data"):
        ops.released(torch.zeros(1))
