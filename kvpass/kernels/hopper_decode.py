"""Decode attention on Hopper: quantized K and V go from their packed bytes straight into tensor-core fragments.

Written in Triton's Gluon dialect, because plain Triton moves dequantized tiles through shared memory, and at the
bandwidth of an H200 that traffic alone is more than a multiprocessor can do. One warp is one program; a program takes
tiles of 32 slots of one KV head, and all its query rows (GQA group times query length, padded to 8 or 16) are the
columns of the matrix product. :func:`supports` says which calls :func:`attention` launches the kernels for. They are in
:mod:`kvpass.kernels.hopper_kernels`, what a tile goes through there in :mod:`kvpass.kernels.hopper_operands`, and which
lane holds what in :mod:`kvpass.kernels.hopper_layouts`.

Fragment order
--------------
An ``m16n8k16`` product has its A operand spread over a warp so that lane ``(r, c)``, number ``4 r + c``, holds rows
``r`` and ``r + 8`` and, of every 16 columns, ``2 c``, ``2 c + 1``, ``2 c + 8`` and ``2 c + 9``. Both products take the
cache as A:

* Scores, ``S^T = K q^T``: rows are slots, columns of A are dimensions. The sum over dimensions may run in any order, so
  lane ``(r, c)`` simply reads its share of the packed row (16 bytes in one piece: 32 e2m1 or 16 wider codes; 8 bytes
  when the row is shorter) and calls them its columns. The query is brought into that order once (``_load_query``).
* Output, ``O^T = V^T P^T``: rows are dimensions, columns of A are slots. Lane ``(r, c)`` reads the ``r``-th eighth of
  the rows of slots ``2 c, 2 c + 1`` (and 8, 16, 24 later), and interleaves the bytes of two neighbouring slots before
  decoding, which gives pairs (slot, slot + 1) of one dimension. Which dimension a row stands for is undone when the
  output is stored.

The scores leave the first product as accumulators, lane ``(r, c)`` holding slot ``r``, columns ``2 c, 2 c + 1``, and
the second product wants probabilities as B operand, slots ``2 c, 2 c + 1`` of column ``r``: ``movmatrix`` transposes
them. Nothing else crosses lanes. In the code the same is said with linear layouts; ``reshape`` and ``permute`` only
rename registers, and ``convert_layout(assert_trivial=True)`` is the compiler's proof of that.

Slots and positions
-------------------
Inside a tile everything is indexed by *position* ``p``, which stands for slot ``slot_of(p)``: the two low bits are
exchanged. K, V, their scales, the probabilities and the mask all use it. Tiled block scales
(:data:`kvpass.formats.SCALE_ORDER`) have the scale of block ``b``, position ``p`` in byte
``32 b + 8 (p >> 1 & 3) + 2 (p >> 3) + (p & 1)``, so that the scales a lane needs for V are 8 neighbouring bytes, and
those it needs for K are every other byte of 8.

In shared memory and registers rows are a power of two wide. Where head_dim is not, the rest is zeros, which are
computed with but neither stored in the cache nor read from it.

Arithmetic
----------
Codes are decoded to fp16 and multiplied by their e4m3 block scale there, which is exact; e2m1 comes out as value times
2^-14, the bits being moved and nothing converted. int8 has one scale for a slot's whole row, which multiplies its
scores, or its probabilities. e8m0 block scales reach exponents that only bf16 holds, so there the
products run in bf16. Sums and softmax are fp32. Query rows are scaled by a power of two into [1, 2) before fp16, and
every factor that is common to a head (tensor scales, 2^14, softmax scale, log2 e) multiplies scores and output only.
A softcap takes the place of that factor of the scores; attention sinks join in the second kernel, with the parts.

Splits
------
The slots of one head are divided among ``splits`` programs, a number that depends on shapes and the device only; the
length is read on the device, and shares differ by one tile at most. Tiles at the start that a row of the mask hides
from all columns (left padding) are neither shared out nor read: each program looks for the first that is not. A program
reads its share in order but starts somewhere inside it: programs that walked the cache in step, a power of two apart,
made the memory 6% slower. A second kernel adds the parts up, always in the same order.

While a program works on one tile, asynchronous copies bring the next one into its other buffer, packed as it is. More
buffers did not help: what hides latency is programs. Up to 16 of them fit a multiprocessor, and for most
formats 8 or 12 are fastest (:func:`capacity`).

Both kernels are launched while the one before them ends (programmatic dependent launch), and so are the store and the
rotation, which in a model are what comes before the first. Each of these three waits for the one before it, and with it
for all that is older, and only then reads anything and lets the next one be launched. After a rotation, which waited so
for the store, the first kernel waits only when its own first copies are on their way; the second one does when it has
weighed what is kept in bf16.

Slots that are kept in bf16, the first and the newest, are hidden from these programs; the second kernel, which is
launched before it has something to add up, weighs them meanwhile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from kvpass.formats import WHOLE_HEAD, KVFormat, get_format
from kvpass.kernels.hopper_kernels import UNPACKED, combine_kernel, decode_kernel
from kvpass.kernels.hopper_layouts import TILE

TESTED_TRITON = ("3.6",)
TRITON = ".".join(triton.__version__.split(".")[:2])

MIN_TILES_PER_SPLIT = 2
MAX_SPLITS = 1024
MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)
# What a multiprocessor of a Hopper GPU has; a program takes 1 KB of shared memory beyond what it asks for.
SHARED_BYTES, SHARED_BYTES_PER_PROGRAM = 228 * 1024, 1024
REGISTERS = 65536


@functools.lru_cache(maxsize=16)
def _device(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def _tile_bytes(fmt: KVFormat, width: int) -> int:
    """Bytes of a tile that are copied to shared memory: codes and block scales. A row's one scale goes to registers."""
    return TILE * (fmt.code_width(width) + (0 if fmt.block == WHOLE_HEAD else fmt.scale_width(width)))


def _factor_left(value: KVFormat) -> float:
    """What multiplies the sums of the first kernel back."""
    if value.codec == "int8":
        return 2.0
    return UNPACKED.value if value.codec == "e2m1" and value.block_scale == "e4m3" else 1.0


class Capacity(NamedTuple):
    """How many programs a multiprocessor is given, and how many multiprocessors there are.

    Attributes:
        resident: As many as it can run at the same time: registers and shared memory limit it.
        wanted: Of those, as many as are fastest.
        balanced: A multiple of this leaves none of its schedulers idle.
        multiprocessors: Of the device.
    """

    resident: int
    wanted: int
    balanced: int
    multiprocessors: int


def capacity(width: int, key: KVFormat, value: KVFormat, registers: int, multiprocessors: int) -> Capacity:
    """Programs of a device, with as many registers a lane. ``width`` is head_dim, up to the next power of two.

    Memory bounds what reads fp8: it is slower the more programs are reading, 8 are enough, and multiprocessors should
    have equally many. Instructions bound the others: each of four schedulers takes as long as it has programs, and
    should have equally many. Three for each leave it nothing to wait for; four are better where a tile is short
    (head_dim 64) or takes many instructions (e8m0 block scales).
    """
    formats = (key, value)
    resident = min(REGISTERS // (32 * registers), SHARED_BYTES // _program_bytes(width, key, value))
    if any(fmt.codec in ("e4m3", "e5m2") for fmt in formats):
        wanted, balanced = 8, 1
    else:
        wanted, balanced = (16 if width == 64 or any(fmt.block_scale == "e8m0" for fmt in formats) else 12), 4
    return Capacity(resident, min(wanted, resident), balanced, multiprocessors)


def _program_bytes(width: int, key: KVFormat, value: KVFormat) -> int:
    """Shared memory of a program: its two buffers."""
    return 2 * (_tile_bytes(key, width) + _tile_bytes(value, width)) + SHARED_BYTES_PER_PROGRAM


def reserved_kilobytes(program_bytes: int, device: Capacity, count: int) -> int:
    """How much shared memory each of ``count`` programs takes beyond what it needs, so that no multiprocessor runs more
    than are wanted, or one more where kilobytes are too coarse. Programs that are launched early go where there is room
    while the kernel before ends, and without this that is more of them on some multiprocessors than on others."""
    if count > device.wanted * device.multiprocessors:
        return 0
    needed = -(-(SHARED_BYTES // (device.wanted + 1) + 1 - program_bytes) // 1024)
    return max(0, min(needed, (SHARED_BYTES // device.wanted - program_bytes) // 1024))


@functools.lru_cache(maxsize=1024)
def split_count(heads: int, max_len: int, device: Capacity) -> int:
    """Programs that share the slots of one KV head.

    Args:
        heads: Independent reductions: batch times KV heads times tiles of query rows.
        max_len: Slots of the cache.
        device: What :func:`capacity` says.

    Returns:
        The largest count that fills whole rounds, ``balanced`` programs on every multiprocessor, to 90%: of those with
        no more programs than wanted, else of those that run at once. Where there is none, the smallest with which all
        waves of such programs are 90% full, or the fullest of up to four waves. Never so many that a full cache gives
        most programs fewer than ``MIN_TILES_PER_SPLIT`` tiles: where all that allows run at once, what fills rounds
        best.
    """
    most = max(1, min(MAX_SPLITS, -(-max_len // (TILE * MIN_TILES_PER_SPLIT))))
    resident, wanted, balanced = (n * device.multiprocessors for n in (device.resident, device.wanted, device.balanced))

    def fill(splits: int, of: int) -> float:
        return heads * splits / (-(-heads * splits // of) * of)

    for room in (wanted, resident):
        for splits in range(min(most, room // heads), 0, -1):
            if fill(splits, balanced) >= 0.9:
                return splits
    if heads * most <= resident:
        return max(range(most, 0, -1), key=lambda splits: fill(splits, balanced))
    counts = range(1, min(most, max(1, 4 * resident // heads)) + 1)
    for splits in counts:
        if fill(splits, resident) >= 0.9:
            return splits
    return max(counts, key=lambda splits: fill(splits, resident))


def supports(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    key_kept_slots: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    value_kept_slots: torch.Tensor | None,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> str | None:
    """Why :func:`attention` does not take this call; None if it does."""
    key, value = get_format(key_format), get_format(value_format)
    value_dim = value.head_dim(value_codes.shape[-1])
    kept = [0 if kept is None else kept.shape[2] for kept in (key_kept, value_kept)]
    return (
        supports_device(query.device)
        or supports_shapes(query, key_codes.shape[1], value_dim, mask, scale, key, value)
        or supports_form(mask, key, max(kept), softcap, sinks is not None)
        or _supports_memory(query, mask, key_codes, key_block_scale, value_codes, value_block_scale)
        or (f"{kept[0]} slots of K are kept and {kept[1]} of V" if kept[0] != kept[1] else None)
    )


def supports_device(device: torch.device) -> str | None:
    """:func:`supports`, as far as it depends on the GPU and on triton."""
    if TRITON not in TESTED_TRITON:
        return f"triton {TRITON}: Gluon is experimental, and this kernel tested with {', '.join(TESTED_TRITON)} only"
    if device.type != "cuda" or _device(device.index or 0)[0] != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return None


def supports_shapes(
    query: torch.Tensor,
    kv_heads: int,
    value_dim: int,
    mask: torch.Tensor | None,
    scale: float,
    key: KVFormat,
    value: KVFormat,
) -> str | None:
    """:func:`supports`, as far as it depends on shapes and dtypes: fake tensors will do."""
    head_dim, group, query_length = query.shape[-1], query.shape[1] // kv_heads, query.shape[2]
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}; takes float16 and bfloat16"
    for fmt in (key, value):
        if fmt.codec not in ("e2m1", "e4m3", "e5m2", "int8"):
            return f"codec {fmt.codec} of format {fmt.name!r}; takes e2m1, e4m3, e5m2 and int8"
        if fmt.block not in (0, 16, WHOLE_HEAD) and not (fmt.block == 32 and head_dim > 64):
            return f"format {fmt.name!r} has blocks of {fmt.block}; takes 16, whole heads, and 32 above head_dim 64"
        if fmt.block_scale == "e8m0" and query.dtype != torch.bfloat16:
            return f"format {fmt.name!r} computes in bfloat16, query is {query.dtype}"
    if head_dim not in range(64, 257, 16) or value_dim != head_dim:
        return f"head_dim {head_dim} of K, {value_dim} of V; takes multiples of 16 from 64 to 256, both alike"
    if query_length > 8 or group > 16:
        return f"{query_length} query tokens and a GQA group of {group}; takes up to 8 and 16"
    if mask is not None and (mask.dtype not in MASK_DTYPES or mask.dim() != 4):
        return f"mask is {mask.dtype} of {mask.dim()} dimensions; takes bool and floats of up to 32 bits, of 4"
    if not scale > 0:
        return f"scale is {scale}; takes a positive one"
    return None


def supports_form(mask: torch.Tensor | None, key: KVFormat, keep: int, softcap: float, has_sinks: bool) -> str | None:
    """:func:`supports`, as far as it depends on what is done with the scores."""
    if keep and (softcap or (mask is not None and mask.dtype != torch.bool)):
        return f"{keep} slots are kept in bf16; takes those with neither a softcap nor a mask that is added"
    if key.centred and (softcap or has_sinks):
        return f"K is centred ({key.name!r}), and a softcap or attention sinks need scores that are not shifted"
    return None


def _supports_memory(
    query: torch.Tensor, mask: torch.Tensor | None, key_codes: torch.Tensor, *others: torch.Tensor | None
) -> str | None:
    if mask is not None and mask.shape[3] < key_codes.shape[2]:
        return f"the mask covers {mask.shape[3]} slots of {key_codes.shape[2]}"
    if query.stride(-1) != 1:
        return "head_dim of the query is not contiguous"
    if not all(b is None or (b.is_contiguous() and b.data_ptr() % 16 == 0) for b in (key_codes, *others)):
        return "a cache buffer is not contiguous or not aligned to 16 bytes"
    return None


def attention(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_block_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    key_centre: torch.Tensor | None,
    key_kept: torch.Tensor | None,
    key_kept_slots: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_block_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    value_centre: torch.Tensor | None,
    value_kept: torch.Tensor | None,
    value_kept_slots: torch.Tensor | None,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    key_format: str,
    value_format: str,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few query tokens to a quantized cache, as :func:`kvpass.ops.attention` has it.

    Rotations are the caller's: what is read is K and V as they are stored. K's centre is left out. Where K is rotated,
    the kernel launched right before this must have waited for what wrote K, V, ``mask`` and ``positions``, as the
    query's rotation has: this one reads them before it waits for that.

    Args:
        query: ``[batch, kv_heads * group, query_length, head_dim]`` fp16, bf16, or fp32 where it is rotated.
        key_codes ... value_kept_slots: As :class:`kvpass.formats.KVBuffers` says.
        positions: ``[query_length]`` int64; slots up to ``positions[-1]`` exist.
        mask: ``[batch or 1, heads or 1, query_length or 1, at least positions[-1] + 1]``, or None: bool (True attends),
            or fp32, fp16 or bf16 (added to the scores; what is below -1e30 hides its slot).
        scale: Multiplies the scores.
        is_causal: Query ``i`` sees slots up to ``positions[i]`` only.
        softcap: 0 for none, else scaled scores ``s`` become ``softcap * tanh(s / softcap)`` before the mask.
        sinks: None, or ``[heads]`` floating: logits that join the softmax of every row of their head.
        out: Where to write the result; None to allocate it in ``query.dtype``.

    Returns:
        ``[batch, heads, query_length, head_dim]``.
    """
    key, value = get_format(key_format), get_format(value_format)
    batch, heads, query_length, head_dim = query.shape
    kv_heads, max_len = key_codes.shape[1:3]
    group = heads // kv_heads
    rows = group * query_length
    width = triton.next_power_of_2(head_dim)
    columns = 8 if rows <= 8 or width == 256 else 16
    row_tiles = triton.cdiv(rows, columns)
    registers = 128 if width * columns <= 1024 else 168  # of a lane: 16 or 12 programs on a multiprocessor
    mask_kind, mask_strides = "none", (0, 0, 0, 0)
    if mask is not None:
        mask_strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
        mask_kind = "row" if mask_strides[1] == mask_strides[2] == 0 else "columns"
        mask_kind = mask_kind if mask.dtype == torch.bool else f"added {mask_kind}"

    multiprocessors = _device(query.device.index)[1]
    device, reductions = capacity(width, key, value, registers, multiprocessors), batch * kv_heads * row_tiles
    splits = split_count(reductions, max_len, device)
    reserved = reserved_kilobytes(_program_bytes(width, key, value), device, reductions * splits)
    partial = query.new_empty(batch * kv_heads * splits * rows * width, dtype=torch.float32)
    statistics = query.new_empty(batch * kv_heads * splits * rows * 2, dtype=torch.float32)
    out = query.new_empty(batch, heads, query_length, head_dim) if out is None else out
    keep = 0 if key_kept is None else key_kept.shape[2]
    block_splits = triton.next_power_of_2(splits)
    block_dim = max(8, min(head_dim & -head_dim, 16384 // block_splits))
    while block_dim > 16 and batch * heads * query_length * head_dim // block_dim < 2 * multiprocessors:
        block_dim //= 2  # few programs would read the parts at a fraction of the bandwidth
    with torch.cuda.device_of(query):
        decode_kernel[(batch * kv_heads, splits, row_tiles)](
            query,
            key_codes,
            key_codes if key_block_scale is None else key_block_scale,
            key_scale,
            value_codes,
            value_codes if value_block_scale is None else value_block_scale,
            positions if key_kept_slots is None else key_kept_slots,
            positions,
            mask,
            partial,
            statistics,
            scale,
            softcap or None,
            max_len,
            splits,
            kv_heads,
            *query.stride()[:3],
            *mask_strides,
            HEAD_DIM=width,
            HELD=head_dim,
            GROUP=group,
            QUERY_LENGTH=query_length,
            COLUMNS=columns,
            K_CODEC=key.codec,
            K_SCALE=key.block_scale,
            K_BLOCK=key.block,
            K_TENSOR_SCALE=key.tensor_scale,
            V_CODEC=value.codec,
            V_SCALE=value.block_scale,
            V_BLOCK=value.block,
            MASK=mask_kind,
            CAUSAL=is_causal and query_length > 1,
            KEEP=keep,
            ROTATED=key.rotated,
            RESERVED=reserved,
            num_warps=1,
            launch_pdl=True,
            maxnreg=registers,
        )
        combine_kernel[(batch * heads * query_length, head_dim // block_dim)](
            partial,
            statistics,
            out,
            value_scale,
            value_centre,
            None if sinks is None else sinks.contiguous(),
            positions,
            max_len,
            splits,
            kv_heads,
            _factor_left(value),
            query,
            key_kept,
            value_kept,
            key_kept_slots,
            mask,
            scale,
            *query.stride()[:3],
            *mask_strides,
            QUERY_LENGTH=query_length,
            ROWS=rows,
            HEAD_DIM=width,
            HELD=head_dim,
            BLOCK_SPLITS=block_splits,
            BLOCK_DIM=block_dim,
            TENSOR_SCALE=value.tensor_scale,
            CAUSAL=is_causal and query_length > 1,
            KEEP=keep,
            KEEP_AT_ONCE=min(8, triton.next_power_of_2(max(keep, 1))),
            num_warps=max(1, min(8, block_splits * block_dim // 1024)),
            enable_fp_fusion=False,  # else lanes that all store the same sum may have rounded it differently
            launch_pdl=True,
        )
    return out
