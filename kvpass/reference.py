"""The specification of every format in plain PyTorch, and the CPU implementation of the operators.

Kernels must produce the same bytes as :func:`quantize` and the same values as :func:`dequantize`. Nothing here is
tuned; read it to learn what a format means.

Special values: a NaN makes its element (fp8) or its whole block (fp4, int8) read back as NaN. An infinity saturates,
except that e8m0 scales reach far enough for it to read back as one.
"""

from __future__ import annotations

import torch
from einops import rearrange

from kvpass.formats import CODECS, SCALE_ORDER, SCALE_TILE, TURN_MARGIN, KVBuffers, KVFormat, rotation_block

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
# Magnitudes at which the e2m1 code rises by one.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E8M0_BIAS = 127
E8M0_MIN_SCALE = 1e-10
FLOAT8_NAN = 0x7F  # a NaN of both e4m3fn and e5m2
E8M0_NAN = 0xFF
# What a search tries, and the divisors and steps of the block scale's bits by which it does; the rule itself is first.
DIVISORS = {"none": (6.0,), "4over6": (6.0, 4.0), "sweep": (6.0,)}
E4M3_STEPS = (0, -2, -1, 1, 2, 3, 4, 5, 6)
E8M0_STEPS = (0, -1, 1)
# How far beyond 6 a search lets values be, and the grid it puts them on: squares of 32 of them add up exactly in fp32.
SEARCH_GRID = {"e4m3": (8.0, 2.0**-8), "e8m0": (16.0, 2.0**-6)}

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def transform(x: torch.Tensor, fmt: KVFormat, centre: torch.Tensor | None) -> torch.Tensor:
    """``(x - centre) @ R`` in fp32, as far as ``fmt`` says; ``x`` is ``[batch, kv_heads, length, head_dim]``."""
    if fmt.centred:
        assert centre is not None
        x = x.float() - centre[:, None]
    return rotate(x) if fmt.rotated else x


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``x @ R`` in fp32 (fp64 stays fp64), for the last dimension: its own inverse.

    ``R`` has the orthonormal Hadamard matrix of size ``rotation_block(head_dim)`` on its diagonal. The butterflies go
    from neighbours outwards; kernels add in the same order.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    size, step = rotation_block(x.shape[-1]), 1
    while step < size:
        first, second = rearrange(x, "... (pairs two step) -> two ... pairs step", two=2, step=step)
        x = rearrange([first + second, first - second], "two ... pairs step -> ... (pairs two step)")
        step *= 2
    rotated: torch.Tensor = x * size**-0.5
    return rotated


def quantize(
    x: torch.Tensor, fmt: KVFormat, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode ``x``, which is centred and rotated already where the format says so (:func:`transform`).

    Args:
        x: ``[batch, kv_heads, length, head_dim]``, any floating dtype; all arithmetic is fp32 unless said otherwise.
        fmt: The format.
        scale: ``[kv_heads]`` float32, required where ``fmt.tensor_scale``.

    Returns:
        Codes ``[batch, kv_heads, length, code_width]``, packed as :class:`~kvpass.formats.KVBuffers` says, and block
        scales ``[batch, kv_heads, length, ceil(head_dim / block)]`` uint8, one row a token (or None).
    """
    if fmt.codec == "bf16":
        return x.to(torch.bfloat16), None
    x = x.float()
    factor = _per_head(scale) if fmt.tensor_scale else torch.ones((), dtype=torch.float32, device=x.device)
    if fmt.codec in _FLOAT8:
        limit = CODECS[fmt.codec].max
        codes = (x / factor).clamp(-limit, limit).to(_FLOAT8[fmt.codec]).view(torch.uint8)
        return torch.where(x.isnan(), FLOAT8_NAN, codes), None

    if fmt.codec == "int8":
        return _quantize_int8(x, factor, fmt)

    blocks = rearrange(x, "... (blocks values) -> ... blocks values", values=fmt.block)
    amax = blocks.abs().amax(-1)  # NaN if any value is
    candidates = _block_scales(amax, factor, fmt)
    bits, divisor = candidates[0]
    if len(candidates) > 1:
        least = _squared_error(blocks, amax, divisor, fmt)
        for other_bits, other_divisor in candidates[1:]:
            error = _squared_error(blocks, amax, other_divisor, fmt)
            better = error < least
            least = torch.where(better, error, least)
            bits = torch.where(better, other_bits, bits)
            divisor = torch.where(better, other_divisor, divisor)
    codes = _encode_e2m1(blocks, divisor, fmt.ties_to_even)
    codes = torch.where((amax.isnan() | (divisor == 0)).unsqueeze(-1), 0, codes).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), bits


def _quantize_int8(x: torch.Tensor, factor: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens: the e4m3 scale at or above ``amax / 127 / factor``, and nearest even codes."""
    largest = CODECS["int8"].max
    amax = x.abs().amax(-1, keepdim=True)  # NaN if any value is
    wanted = amax / largest / factor
    bits = _encode_e4m3(wanted)
    bits = bits + (_decode_block_scale(bits.to(torch.uint8), fmt) < wanted).int()
    bits = torch.where(amax.isnan(), FLOAT8_NAN, bits.clamp(max=FLOAT8_NAN - 1)).to(torch.uint8)
    divisor = _decode_block_scale(bits, fmt) * factor
    codes = (x / divisor).clamp(-largest, largest).round()
    codes = torch.where(amax.isnan() | (divisor == 0), 0.0, codes)
    return codes.to(torch.int8).view(torch.uint8), bits


def _block_scales(amax: torch.Tensor, factor: torch.Tensor, fmt: KVFormat) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is tried for blocks of this ``amax``: bits of the block scale, uint8, and what then divides the values."""
    is_e4m3, searches = fmt.block_scale == "e4m3", fmt.search != "none"
    # A search has no use for an e4m3 scale of zero, except for a block of zeros.
    smallest = ((amax != 0) & searches & is_e4m3).int()
    largest, nan = (FLOAT8_NAN - 1, FLOAT8_NAN) if is_e4m3 else (E8M0_NAN - 1, E8M0_NAN)
    steps = (E4M3_STEPS if is_e4m3 else E8M0_STEPS) if fmt.search == "sweep" else (0,)
    candidates = []
    for wanted in DIVISORS[fmt.search]:
        # NVFP4: sf = e4m3(amax / 6 / global); a block scale of zero makes every code of its block zero.
        base = _encode_e4m3(amax / wanted / factor) if is_e4m3 else _exponent(amax, fmt)
        for step in steps:
            bits = torch.maximum((base + step).clamp(0, largest), smallest)
            bits = torch.where(amax.isnan(), nan, bits).to(torch.uint8)
            candidates.append((bits, _decode_block_scale(bits, fmt) * factor))
    return candidates


def _encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Bits of ``x`` (not negative) in e4m3, saturating; int32."""
    return x.clamp(max=CODECS["e4m3"].max).to(torch.float8_e4m3fn).view(torch.uint8).int()


def _exponent(amax: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """The e8m0 bits that the rule of ``fmt`` gives, int32. From the bits of the fp32 number: log2 in floating point can
    land on the wrong side of an integer."""
    if fmt.scale_rule == "floor":  # OCP Microscaling 1.0, section 6.3: floor(log2(amax)) - 2
        return ((amax.view(torch.int32) >> 23) - 2).clamp(min=0)
    least = (amax / E2M1_MAX).nan_to_num(nan=0.0).clamp(min=E8M0_MIN_SCALE, max=2.0**127).view(torch.int32)
    return (least >> 23) + ((least & 0x7FFFFF) != 0).int()


def _squared_error(blocks: torch.Tensor, amax: torch.Tensor, divisor: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Squared error of storing ``blocks`` (``[..., block]``) by ``divisor`` (``[...]``), fp32.

    Quotients are rounded to a grid first, and then all sums are exact: the result does not depend on their order. It is
    infinite where a block would reach too far beyond the largest code, as one does that saturates the block scale.
    """
    reach, step = SEARCH_GRID[fmt.block_scale]
    inverse = 1.0 / divisor
    to_step = 1.5 * 2.0**23 * step  # a sum with it is rounded to a multiple of the step
    scaled = (blocks.abs() * inverse.unsqueeze(-1) + to_step) - to_step
    power = (scaled.clamp(min=1.0).view(torch.int32) & 0x7F800000).view(torch.float32)
    to_two_bits = power * (1.5 * 2.0**22)  # likewise
    rounded = (scaled + to_two_bits) - to_two_bits
    error = (scaled - rounded.clamp(max=E2M1_MAX)).square().sum(-1) * divisor * divisor
    return torch.where(amax * inverse > reach, torch.inf, error)


def centre_of(
    x: torch.Tensor, turns: torch.Tensor | None = None, is_written: torch.Tensor | None = None
) -> torch.Tensor:
    """The centre of tokens of which those at positions 0, 1, ... are given.

    Without ``turns`` it is their mean over rows and tokens. With them it is what is to be expected of the mean of all
    tokens: what the given ones, turned back, have in common, turned on. Which channels are turned together is not
    asked but seen, in each head: the right pairs, halves or neighbours, turned back, have the largest mean. Where
    neither have a larger one than the channels as they are (all are alike, but for rounding, of a single token),
    nothing is turned: there are layers without rotary embedding in models that have it.

    Args:
        x: ``[batch, kv_heads, length, head_dim]``, floating.
        turns: ``[at least 1 + length, pairs, 2]`` float32, real and imaginary parts of factors of each of the pairs
            that the first ``2 * pairs`` channels are: first what turns the common part on to the mean over all
            positions (:func:`kvpass.first_tokens.turns`), then what turns back each token.
        is_written: ``[length]`` bool, False for slots of zeros that are no tokens; None where all are.

    Returns:
        ``[kv_heads, head_dim]`` float32, 0 where that is not finite.
    """
    x = x.float()
    count = x.shape[0] * (x.shape[2] if is_written is None else is_written.sum().clamp(min=1))
    mean = (x.sum((0, 2)) / count).nan_to_num(0.0, 0.0, 0.0)
    if turns is None:
        return mean
    turned = 2 * turns.shape[1]
    centre, rest = mean[:, :turned], mean[:, turned:]
    largest = TURN_MARGIN * centre.square().sum(1)
    for shape, axis in (((2, -1), -2), ((-1, 2), -1)):
        pairs = x[..., :turned].unflatten(-1, shape).movedim(axis, 0).contiguous()
        common = _turned(pairs, turns[1 : 1 + x.shape[2]]).sum((1, 3)) / count
        common = common.nan_to_num(0.0, 0.0, 0.0)  # [2, kv_heads, pairs]
        squares = common.square().sum((0, 2))
        onward = _turned(common, turns[0]).movedim(0, axis).flatten(1)
        centre = torch.where((squares > largest)[:, None], onward, centre)
        largest = torch.maximum(largest, squares)
    return torch.cat([centre, rest], 1)


def _turned(pairs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``pairs`` (``[2, ..., pairs]``) times complex ``factors`` (``[..., pairs, 2]``)."""
    (first, second), (real, imaginary) = pairs, factors.movedim(-1, 0).contiguous()
    return torch.stack([first * real - second * imaginary, first * imaginary + second * real])


def scale_of(
    x: torch.Tensor,
    step: float = 1 / 16,
    centre: torch.Tensor | None = None,
    is_written: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tensor scale that a format of e4m3 block scales takes from the tokens ``x``, stored less ``centre``.

    With ``p`` the power of two at or below the largest magnitude ``a``, it is ``p * step``: ``p / 16`` for e2m1
    (``p / 256`` for int8). Then ``a`` has a block scale ``a / 6 / scale`` from 2.7 to 5.3 (2 to 4), the middle, in
    octaves, of what e4m3 holds as a normal number, ``2**-6`` to 448. A later token can be 84 times as large before it
    saturates, and a block scale loses bits only where its block is 170 times as small (128). As a power of two it
    changes no rounding of any other block scale: which of them it is, and so the other rows of a batch and their
    padding, shows at those two ends alone.

    ``a`` is at least a sixteenth of the magnitude before ``centre`` is taken away: a prompt of one token is its own
    centre, and says nothing of how far others lie. A rotation is left out. It changes ``a`` by ``sqrt(head_dim)`` at
    most. What is not finite does not count, and the scale is 1 where nothing is left.

    Args:
        x: ``[batch, kv_heads, length, head_dim]``, floating.
        step: :attr:`kvpass.formats.KVFormat.learnt_step`.
        centre: ``[kv_heads, head_dim]`` float32, or None.
        is_written: ``[length]`` bool, as for :func:`centre_of`.

    Returns:
        ``[kv_heads]`` float32.
    """
    magnitude = (x.float() if x.dtype == torch.float64 else x).abs()
    if centre is not None:
        distance = x.float() - centre[:, None]
        distance = distance if is_written is None else distance * is_written[:, None]
        magnitude = torch.maximum(distance.abs(), magnitude.float() / 16)
    largest = magnitude.nan_to_num(0.0, 0.0).amax((0, 2, 3)).float()
    power = (largest.clamp(min=2.0**-100).view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(largest == 0, 1.0, power * step)


def write(buffers: KVBuffers, fmt: KVFormat, x: torch.Tensor, positions: torch.Tensor, keep_first: int = 0) -> None:
    """Quantize ``x`` (``[batch, kv_heads, length, head_dim]``) into the slots ``positions`` (``[length]`` int64), and
    keep those that :func:`kept_rows` says."""
    x = transform(x, fmt, buffers.centre)
    codes, block_scale = quantize(x, fmt, buffers.scale)
    buffers.codes.index_copy_(2, positions, codes)
    if block_scale is not None and buffers.block_scale is not None:
        _write_scales(buffers.block_scale, block_scale, positions)
    if buffers.kept is not None and buffers.kept_slots is not None and len(positions):
        rows = kept_rows(positions, buffers.kept.shape[2], keep_first, buffers.codes.shape[2])
        is_kept = rows >= 0
        buffers.kept_slots[torch.isin(buffers.kept_slots, positions)] = -1  # rows of what is overwritten
        buffers.kept_slots[rows[is_kept]] = positions[is_kept].int()
        buffers.kept.index_copy_(2, rows[is_kept], x[:, :, is_kept].to(torch.bfloat16))


def kept_rows(positions: torch.Tensor, keep: int, keep_first: int, max_len: int) -> torch.Tensor:
    """Where the tokens of one call are kept in bf16.

    Slots below ``keep_first`` have a row each. The others share what is left, the ``keep - keep_first`` newest at a
    time: slot ``s`` has row ``keep_first + (s - keep_first) % (keep - keep_first)`` until a newer one needs it. Of
    consecutive slots each takes its row, or leaves it to a later one of the same call; of others, those that do neither
    have to be looked for in ``kept_slots``, so that no row is ever of another token than the one its slot holds.

    Args:
        positions: ``[length]`` int64, slots, no two alike. The newest is the last. In a ring, slot 0 follows slot
            ``max_len - 1``, and ``max_len - keep_first`` is a multiple of ``keep - keep_first``.

    Returns:
        ``[length]`` int64: rows, no two alike; -1 for what is not kept.
    """
    keep_first = min(keep_first, keep)
    newest = keep - keep_first
    is_first = positions < keep_first
    if not newest:
        return torch.where(is_first, positions, -1)
    last = positions[-1].clamp(min=keep_first - 1, max=max_len - 1)
    age = (last - positions) % (max_len - keep_first)
    row = keep_first + (positions - keep_first) % newest
    return torch.where(is_first, positions, torch.where(age < newest, row, -1))


def scale_rows(block_scale: torch.Tensor, length: int) -> torch.Tensor:
    """Tiled block scales as ``[batch, kv_heads, length, ceil(head_dim / block)]``: one row a token."""
    order = torch.tensor(SCALE_ORDER, device=block_scale.device)
    rows = rearrange(block_scale[..., order], "batch kv tiles blocks slots -> batch kv (tiles slots) blocks")
    return rows[:, :, :length]


def to_interchange(buffers: KVBuffers, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies of the first ``length`` slots in the packing that SGLang and FlashInfer exchange.

    Returns:
        Codes ``[batch, kv_heads, length, code_width]`` (``e2m1``: even index of head_dim in the low nibble) and block
        scales ``[batch, kv_heads, length, ceil(head_dim / block)]`` uint8, one row a token (None without block scales).
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
    codes, block_scale, scale, centre, kept, kept_slots = buffers
    if fmt.codec == "bf16":
        return codes.to(dtype)
    if fmt.codec in _FLOAT8:
        value = codes.view(_FLOAT8[fmt.codec]).float()
    elif fmt.codec == "int8":
        value = codes.view(torch.int8).float()
    else:
        nibbles = rearrange([codes & 0xF, codes >> 4], "two ... bytes -> ... (bytes two)")
        magnitude = torch.tensor(E2M1_VALUES, device=codes.device)[(nibbles & 7).long()]
        value = torch.where(nibbles >= 8, -magnitude, magnitude)
    if block_scale is not None:
        of_blocks = _decode_block_scale(scale_rows(block_scale, codes.shape[2]), fmt)
        value = value * of_blocks.repeat_interleave(fmt.block, dim=-1)[..., : value.shape[-1]]
    if fmt.tensor_scale:
        value = value * _per_head(scale)
    if kept is not None and kept_slots is not None:
        is_read = (kept_slots >= 0) & (kept_slots < codes.shape[2])
        value[:, :, kept_slots[is_read].long()] = kept[:, :, is_read].float()
    if fmt.rotated:
        value = rotate(value)
    if fmt.centred:
        assert centre is not None
        value = value + centre[:, None]
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


def _decode_block_scale(bits: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Block scales as fp32."""
    return bits.view(torch.float8_e4m3fn).float() if fmt.block_scale == "e4m3" else _decode_e8m0(bits)


def _decode_e8m0(bits: torch.Tensor) -> torch.Tensor:
    """``2 ** (bits - 127)`` as fp32; 255 is NaN, and 0 is the subnormal ``2 ** -127``."""
    exponent = bits.to(torch.int32)
    power = torch.where(exponent == 0, 0x00400000, exponent << 23).view(torch.float32)
    return torch.where(exponent == E8M0_NAN, torch.nan, power)


def _encode_e2m1(x: torch.Tensor, divisor: torch.Tensor, ties_to_even: bool) -> torch.Tensor:
    """Nearest e2m1 codes of ``x / divisor`` (``[..., block]``, ``[...]``), saturating: sign in bit 3, magnitude index
    in bits 0 to 2. uint8.

    The quotient is not rounded first: in fp64, where a midpoint times the divisor is exact, ``x`` is compared with it.
    """
    magnitude, divisor = x.abs().double(), divisor.double().unsqueeze(-1)
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate(E2M1_MIDPOINTS):
        # Midpoint `index` lies between codes `index` and `index + 1`: to even, a tie rises when `index` is odd.
        threshold = midpoint * divisor
        rises = magnitude > threshold if ties_to_even and index % 2 == 0 else magnitude >= threshold
        code += rises.to(torch.uint8)
    return code | (x < 0).to(torch.uint8) << 3
