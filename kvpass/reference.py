"""The specification of every format in plain PyTorch, and the CPU implementation of the operators.

Kernels must produce the same bytes as :func:`quantize` and the same values as :func:`dequantize`. Nothing here is
tuned; read it to learn what a format means.

Special values: a NaN makes its element (fp8) or its whole block (fp4) read back as NaN. An infinity saturates, except
that e8m0 scales reach far enough for it to read back as one.
"""

from __future__ import annotations

import torch
from einops import rearrange

from kvpass.formats import CODECS, SCALE_ORDER, SCALE_TILE, KVBuffers, KVFormat

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
# Magnitudes at which the e2m1 code rises by one.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E8M0_BIAS = 127
E8M0_MIN_SCALE = 1e-10
FLOAT8_NAN = 0x7F  # a NaN of both e4m3fn and e5m2
E8M0_NAN = 0xFF

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantize(
    x: torch.Tensor, fmt: KVFormat, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode ``x``.

    Args:
        x: ``[batch, kv_heads, length, head_dim]``, any floating dtype; all arithmetic is fp32.
        fmt: The format.
        scale: ``[kv_heads]`` float32, required where ``fmt.tensor_scale``.

    Returns:
        Codes ``[batch, kv_heads, length, code_width]``, packed as :class:`~kvpass.formats.KVBuffers` says, and block
        scales ``[batch, kv_heads, length, head_dim // block]`` uint8, one row a token (or None).
    """
    if fmt.codec == "bf16":
        return x.to(torch.bfloat16), None
    x = x.float()
    factor = _per_head(scale) if fmt.tensor_scale else torch.ones((), dtype=torch.float32, device=x.device)
    if fmt.codec in _FLOAT8:
        limit = CODECS[fmt.codec].max
        codes = (x / factor).clamp(-limit, limit).to(_FLOAT8[fmt.codec]).view(torch.uint8)
        return torch.where(x.isnan(), FLOAT8_NAN, codes), None

    blocks = rearrange(x, "... (blocks values) -> ... blocks values", values=fmt.block)
    amax = blocks.abs().amax(-1)  # NaN if any value is
    if fmt.block_scale == "e4m3":
        # NVFP4: sf = e4m3(amax / 6 / global); a block scale of zero makes every code of its block zero.
        block_scale = (amax / E2M1_MAX / factor).clamp(max=CODECS["e4m3"].max).to(torch.float8_e4m3fn)
        bits = block_scale.view(torch.uint8)
        divisor = (block_scale.float() * factor).unsqueeze(-1)
        scaled = torch.where(divisor == 0, 0.0, blocks / divisor)
        codes = _encode_e2m1(scaled, ties_to_even=True)
    else:
        # The exponent of the power of two at or above amax / 6, from the bits of the fp32 number: log2 in floating
        # point can land on the wrong side of an integer.
        least = (amax / E2M1_MAX).nan_to_num(nan=0.0).clamp(min=E8M0_MIN_SCALE, max=2.0**127).view(torch.int32)
        exponent = (least >> 23) + ((least & 0x7FFFFF) != 0).int()
        bits = torch.where(amax.isnan(), E8M0_NAN, exponent).to(torch.uint8)
        scaled = blocks / _decode_e8m0(exponent.to(torch.uint8)).unsqueeze(-1)
        codes = _encode_e2m1(scaled, ties_to_even=False)
    codes = torch.where(amax.isnan().unsqueeze(-1), 0, codes).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), bits


def write(buffers: KVBuffers, fmt: KVFormat, x: torch.Tensor, positions: torch.Tensor) -> None:
    """Quantize ``x`` (``[batch, kv_heads, length, head_dim]``) into the slots ``positions`` (``[length]`` int64)."""
    codes, block_scale = quantize(x, fmt, buffers.scale)
    buffers.codes.index_copy_(2, positions, codes)
    if block_scale is not None and buffers.block_scale is not None:
        _write_scales(buffers.block_scale, block_scale, positions)


def scale_rows(block_scale: torch.Tensor, length: int) -> torch.Tensor:
    """Tiled block scales as ``[batch, kv_heads, length, head_dim // block]``: one row a token."""
    order = torch.tensor(SCALE_ORDER, device=block_scale.device)
    rows = rearrange(block_scale[..., order], "batch kv tiles blocks slots -> batch kv (tiles slots) blocks")
    return rows[:, :, :length]


def to_interchange(buffers: KVBuffers, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies of the first ``length`` slots in the packing that SGLang and FlashInfer exchange.

    Returns:
        Codes ``[batch, kv_heads, length, code_width]`` (``e2m1``: even index of head_dim in the low nibble) and block
        scales ``[batch, kv_heads, length, head_dim // block]`` uint8, one row a token (None without block scales).
    """
    rows = None if buffers.block_scale is None else scale_rows(buffers.block_scale, length).clone()
    return buffers.codes[:, :, :length].clone(), rows


def from_interchange(buffers: KVBuffers, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Write what :func:`to_interchange` returns into the first slots of ``buffers``.

    Raises:
        ValueError: ``codes`` or ``scales`` do not have the shape of these buffers' rows.
    """
    slots = torch.arange(codes.shape[2], device=codes.device)
    expected = (*buffers.codes.shape[:2], codes.shape[2], buffers.codes.shape[3])
    if codes.shape != expected or codes.shape[2] > buffers.codes.shape[2]:
        raise ValueError(f"codes are {tuple(codes.shape)}; these buffers hold rows of {tuple(buffers.codes.shape)}")
    if buffers.block_scale is not None:
        rows = (*expected[:3], buffers.block_scale.shape[3])
        if scales is None or scales.shape != rows:
            raise ValueError(f"block scales are {None if scales is None else tuple(scales.shape)}; expected {rows}")
        _write_scales(buffers.block_scale, scales, slots)
    buffers.codes.index_copy_(2, slots, codes)


def _write_scales(block_scale: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
    within = torch.tensor(SCALE_ORDER, device=positions.device)[positions % SCALE_TILE]
    # Indexing two dimensions apart moves the indexed one to the front: [length, batch, kv_heads, blocks].
    block_scale[:, :, positions // SCALE_TILE, :, within] = rows.permute(2, 0, 1, 3)


def dequantize(buffers: KVBuffers, fmt: KVFormat, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode every slot of ``buffers``.

    Returns:
        ``[batch, kv_heads, max_len, head_dim]`` in ``dtype``; the arithmetic is fp32.
    """
    codes, block_scale, scale = buffers
    if fmt.codec == "bf16":
        return codes.to(dtype)
    if fmt.codec in _FLOAT8:
        value = codes.view(_FLOAT8[fmt.codec]).float()
    else:
        assert block_scale is not None
        nibbles = rearrange([codes & 0xF, codes >> 4], "two ... bytes -> ... (bytes two)")
        magnitude = torch.tensor(E2M1_VALUES, device=codes.device)[(nibbles & 7).long()]
        value = torch.where(nibbles >= 8, -magnitude, magnitude)
        bits = scale_rows(block_scale, codes.shape[2])
        per_block = bits.view(torch.float8_e4m3fn).float() if fmt.block_scale == "e4m3" else _decode_e8m0(bits)
        value = value * per_block.repeat_interleave(fmt.block, dim=-1)
    if fmt.tensor_scale:
        value = value * _per_head(scale)
    return value.to(dtype)


def saturation(buffers: KVBuffers, fmt: KVFormat, length: int) -> float:
    """Share of the first ``length`` slots that lies at the end of the tensor scale's range: codes of the largest
    magnitude, or block scales of the largest value. 0 for a format without a tensor scale."""
    if not fmt.tensor_scale:
        return 0.0
    largest = torch.tensor(CODECS[fmt.codec].max if fmt.codec in _FLOAT8 else CODECS["e4m3"].max)
    if fmt.codec in _FLOAT8:
        bits, sign = buffers.codes[:, :, :length], 0x7F
        largest = largest.to(_FLOAT8[fmt.codec])
    else:
        assert buffers.block_scale is not None
        bits, sign = scale_rows(buffers.block_scale, length), 0xFF
        largest = largest.to(torch.float8_e4m3fn)
    return float((bits & sign == int(largest.view(torch.uint8))).float().mean())


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over decoded K and V, in the precision of its inputs raised to fp32 (fp64 stays fp64).

    Args:
        query: ``[batch, heads, length, key_dim]``; ``heads`` is a multiple of ``kv_heads`` (GQA: query head ``h`` reads
            KV head ``h // (heads // kv_heads)``).
        key, value: ``[batch, kv_heads, max_len, key_dim or value_dim]``.
        positions: ``[length]`` int64, ascending: the slot of each query token. Slots after ``positions[-1]`` do not
            exist.
        mask: None, or ``[batch or 1, heads or 1, length or 1, at least positions[-1] + 1]``, boolean (True attends) or
            floating (added to the scaled scores).
        scale: Multiplies the scores.
        is_causal: Query ``i`` sees slots up to ``positions[i]`` only.
        softcap: 0 for none, else scaled scores ``s`` become ``softcap * tanh(s / softcap)`` before the mask (Gemma 2).
        sinks: None, or ``[heads]`` floating: a logit that joins the softmax of every row of its head and takes no value
            (GPT-OSS).

    Returns:
        ``[batch, heads, length, value_dim]`` in ``query.dtype``; a row whose every slot is masked is zero.
    """
    batch, heads, length, _ = query.shape
    kv_heads, compute = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    end = int(positions[-1]) + 1
    key, value = key[:, :, :end].to(compute), value[:, :, :end].to(compute)
    grouped = rearrange(query.to(compute), "batch (kv group) length dim -> batch kv group length dim", kv=kv_heads)
    scores = grouped @ rearrange(key, "batch kv slots dim -> batch kv 1 dim slots") * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        visible = mask[..., :end].expand(batch, heads, length, end)
        visible = rearrange(visible, "batch (kv group) length slots -> batch kv group length slots", kv=kv_heads)
        scores = scores.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else scores + visible
    if is_causal:
        slots = torch.arange(end, device=query.device)
        scores = scores.masked_fill(slots > positions[:, None], -torch.inf)
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    if sinks is not None:
        sink = rearrange(sinks.to(scores), "(kv group) -> kv group 1 1", kv=kv_heads)
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    probabilities = torch.softmax(scores, -1)[..., :end].masked_fill(sees_nothing, 0.0)
    out = probabilities @ rearrange(value, "batch kv slots dim -> batch kv 1 slots dim")
    return rearrange(out, "batch kv group length dim -> batch (kv group) length dim").to(query.dtype)


def _per_head(scale: torch.Tensor | None) -> torch.Tensor:
    """``[kv_heads]`` shaped to multiply ``[batch, kv_heads, length, head_dim]``."""
    assert scale is not None
    return scale.view(-1, 1, 1)


def _decode_e8m0(bits: torch.Tensor) -> torch.Tensor:
    """``2 ** (bits - 127)`` as fp32; 255 is NaN, and 0 is the subnormal ``2 ** -127``."""
    exponent = bits.to(torch.int32)
    power = torch.where(exponent == 0, 0x00400000, exponent << 23).view(torch.float32)
    return torch.where(exponent == E8M0_NAN, torch.nan, power)


def _encode_e2m1(x: torch.Tensor, ties_to_even: bool) -> torch.Tensor:
    """Nearest e2m1 code of ``x`` (saturating): sign in bit 3, magnitude index in bits 0 to 2. uint8."""
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate(E2M1_MIDPOINTS):
        # Midpoint `index` lies between codes `index` and `index + 1`: to even, a tie rises when `index` is odd.
        rises = magnitude > midpoint if ties_to_even and index % 2 == 0 else magnitude >= midpoint
        code += rises.to(torch.uint8)
    return code | (x < 0).to(torch.uint8) << 3
