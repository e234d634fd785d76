"""What kvpass's decode attention is compared with: the table is :data:`PEERS`.

A peer that is not installed, does not take a case or does not compile raises, and gets a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.bench.case import Case, Unsupported, Variant, static_attention
from kvpass.bench.shapes import RAGGED_STEP
from kvpass.bench.timing import copies_for

PAGE = RAGGED_STEP
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Peer:
    """How rows call it, and how it is built for a case; ``build`` raises where it cannot be."""

    label: str
    build: Callable[[str, Case], Variant]


def _transformers_static(label: str, case: Case) -> Variant:
    """repeat_kv, boolean mask, SDPA: ``generate(cache_implementation="static")``."""
    copies = case.dense_copies()
    return Variant(
        label, "peer", lambda i: static_attention(case, *copies[i]), len(copies), case.dense_bytes(), case.dense
    )


def _sdpa_gqa(label: str, case: Case) -> Variant:
    """torch's attention with grouped heads over exactly the tokens in use: needs the length on the host."""
    if any(case.padding):
        raise Unsupported("runs without a mask, so it cannot hide padding")
    if case.shape.query > 1:
        raise Unsupported("runs without a mask, so it takes one query token")
    copies, end = case.dense_copies(), case.shape.tokens

    def call(index: int) -> Tensor:
        key, value = (x[:, :, :end] for x in copies[index])
        return F.scaled_dot_product_attention(case.query, key, value, scale=case.scale, enable_gqa=True)

    return Variant(label, "peer", call, len(copies), case.dense_bytes(), case.dense)


def _fa2(storage: torch.dtype | None) -> Callable[[str, Case], Variant]:
    """FlashInfer's FlashAttention-2 decode over a paged cache; padding is left out of the page table."""

    def build(label: str, case: Case) -> Variant:
        _need_flashinfer(case)
        import flashinfer

        shape, pages = case.shape, _Pages(case, storage or case.dtype)
        counts = torch.tensor(pages.counts, dtype=torch.int32, device=case.device)
        indptr = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        indices = torch.cat(pages.rows())
        last = torch.full_like(counts, (shape.tokens - 1) % PAGE + 1)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
            backend="fa2",
        )
        wrapper.plan(
            indptr, indices, last, shape.heads, shape.kv_heads, shape.head_dim, PAGE,
            q_data_type=case.dtype, kv_data_type=pages.dtype,
        )  # fmt: skip
        query = case.query.squeeze(2)
        return pages.variant(label, lambda i: wrapper.run(query, pages.copies[i]).unsqueeze(2))

    return build


def _xqa(storage: torch.dtype | None) -> Callable[[str, Case], Variant]:
    """FlashInfer's XQA decode, NVIDIA's kernel for grouped queries; padding is left out of the page table."""

    def build(label: str, case: Case) -> Variant:
        _need_flashinfer(case)
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        pages = _Pages(case, storage or case.dtype)
        table = torch.nn.utils.rnn.pad_sequence(pages.rows(), batch_first=True).contiguous()
        lengths = [case.shape.tokens - pad for pad in case.padding]
        device_lengths = torch.tensor(lengths, dtype=torch.int32, device=case.device)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
        query = case.query.squeeze(2).contiguous()

        def call(index: int) -> Tensor:
            out: Tensor = xqa_batch_decode_with_kv_cache(
                query, pages.copies[index], workspace, table, device_lengths, max(lengths),
                bmm1_scale=case.scale, bmm2_scale=1.0, kv_layout="NHD",
            )  # fmt: skip
            return out.unsqueeze(2)

        return pages.variant(label, call)

    return build


FP8 = torch.float8_e4m3fn
# Where a label says nothing of a dtype, K and V are stored in that of the query.
PEERS: dict[str, Peer] = {
    "static": Peer("transformers static path", _transformers_static),
    "sdpa": Peer("torch SDPA, GQA, no mask", _sdpa_gqa),
    "fa2": Peer("FlashInfer FA2", _fa2(None)),
    "fa2-fp8": Peer("FlashInfer FA2 fp8", _fa2(FP8)),
    "xqa": Peer("FlashInfer XQA", _xqa(None)),
    "xqa-fp8": Peer("FlashInfer XQA fp8", _xqa(FP8)),
}


class _Pages:
    """K and V as FlashInfer takes them: ``[pages, 2, page, kv_heads, head_dim]``, each row's pages in order."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype, shape = case, dtype, case.shape
        self.per_row = -(-shape.tokens // PAGE)
        self.counts = [self.per_row - pad // PAGE for pad in case.padding]
        size = (shape.batch, self.per_row, 2, PAGE, shape.kv_heads, shape.head_dim)
        pages = torch.zeros(size, dtype=dtype, device=case.device)
        flat = torch.zeros(shape.kv_heads, self.per_row * PAGE, shape.head_dim, dtype=case.dtype, device=case.device)
        for row in range(shape.batch):
            for which, dense in enumerate((case.key, case.value)):
                flat[:, : shape.tokens] = dense[row, :, : shape.tokens]
                pages[row, :, which] = flat.unflatten(1, (self.per_row, PAGE)).permute(1, 2, 0, 3).to(dtype)
        self.by_row = pages
        first = pages.flatten(0, 1)
        copies = copies_for(case.dense_bytes(dtype.itemsize), case.device)
        self.copies = [first, *(first.clone() for _ in range(copies - 1))]

    def rows(self) -> list[Tensor]:
        """The pages of each row that hold tokens which attention sees, int32."""
        ends = [(row + 1) * self.per_row for row in range(len(self.counts))]
        return [
            torch.arange(end - count, end, dtype=torch.int32, device=self.case.device)
            for end, count in zip(ends, self.counts, strict=True)
        ]

    def decoded(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        both = self.by_row[row, :, :, :, head].float().double()
        key, value = (both[:, which].flatten(0, 1)[: self.case.shape.tokens] for which in (0, 1))
        return key, value

    def variant(self, label: str, call: Callable[[int], Tensor]) -> Variant:
        nbytes = self.case.dense_bytes(self.dtype.itemsize)
        return Variant(label, "peer", call, len(self.copies), nbytes, self.decoded)


def _need_flashinfer(case: Case) -> None:
    if case.device.type != "cuda":
        raise Unsupported("needs a CUDA GPU")
    if case.shape.query > 1:
        raise Unsupported("is a decode kernel of one query token")
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        raise Unsupported(f"not installed ({error}); pip install flashinfer-python") from None
