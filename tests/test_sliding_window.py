"""Layers with a sliding window, or chunks, as rings: right in eager mode, fused, one graph however full they are."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, Llama4ForCausalLM, Llama4TextConfig, MistralConfig, MistralForCausalLM

import kvpass
from kvpass import ops
from kvpass.cache import QuantizedCache
from kvpass.formats import format_names
from kvpass.fx_passes.match import DEQUANTIZE, UNROLL, Rejected, Site, find_sites
from kvpass.fx_passes.rewrite import ATTENTION, rewrite
from kvpass.fx_passes.sdpa import SDPA
from kvpass.layers import SPARE_SLOTS

pytestmark = pytest.mark.usefixtures("no_code_is_generated")

FORMATS = format_names()[:5]
WINDOW, LONGEST = 16, 112
SLOTS = WINDOW + SPARE_SLOTS


@pytest.fixture
def mistral():
    return _mistral()


def _mistral(**overrides):
    torch.manual_seed(0)
    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "sliding_window": WINDOW,
        "initializer_range": 0.2,
    }
    return MistralForCausalLM(MistralConfig(**(settings | overrides))).eval()


def _llama4():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        hidden_size=64,
        intermediate_size=32,
        intermediate_size_mlp=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        initializer_range=0.2,
        pad_token_id=0,
    )
    return Llama4ForCausalLM(config).eval()


@pytest.fixture
def ids():
    return torch.randint(1, 256, (3, LONGEST), generator=torch.Generator().manual_seed(1))


class Rounded(DynamicCache):
    """transformers' own cache, which stores what the bf16 format stores: K and V rounded, but exact in a first
    prefill or (a ring's own rule) when more tokens come than a ring has spare slots for."""

    def update(self, key, value, index, *args, **kwargs):
        stored = self.get_seq_length(index)
        rounded = super().update(key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), index, *args, **kwargs)
        new = key.shape[2]
        if (stored == 0 and new > 1) or (new > 1 + SPARE_SLOTS and self.is_sliding[index]):
            return tuple(
                torch.cat([old[:, :, :-new], exact], 2) for old, exact in zip(rounded, (key, value), strict=True)
            )
        return rounded


@torch.no_grad()
def logits(model, cache, ids, lengths, mask=None, start=0):
    """Logits of chunks of these lengths, one after the other through the same cache."""
    outs = []
    for length in lengths:
        end, more = start + length, {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            more = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        outs.append(model(ids[:, start:end], past_key_values=cache, **more).logits)
        start = end
    return torch.cat(outs, 1)


def poisoned(cache, batch=3, kv_heads=2, head_dim=16):
    cache.early_initialization(batch, kv_heads, head_dim, torch.float32, torch.device("cpu"))
    for layer in cache.layers:
        for tensor in (layer.key.codes, layer.value.codes, layer.key.block_scale, layer.value.block_scale):
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0xFF)
    return cache


class TestOperators:
    def test_unroll_worked_out_by_hand(self):
        ring = torch.arange(4.0).view(1, 1, 4, 1)
        for last, expected in (
            (-1, [0, 0, 0, 0, 0, 0]),
            (1, [0, 1, 0, 0, 0, 0]),
            (3, [0, 1, 2, 3, 0, 0]),
            (4, [0, 1, 2, 3, 0, 0]),  # position 4 is in slot 0, position 0 is gone
            (5, [0, 0, 2, 3, 0, 1]),
        ):
            out = ops.unroll(ring, torch.tensor([0, last]), 6)
            assert out.flatten().tolist() == expected, last
        assert ops.unroll(ring, torch.tensor([6]), 6).isnan().all()

    def test_unroll_reads_no_slot_without_a_token(self):
        ring = torch.full((1, 1, 4, 2), float("nan"))
        ring[:, :, :2] = 1.0
        assert ops.unroll(ring, torch.tensor([1]), 6)[0, 0, :, 0].tolist() == [1, 1, 0, 0, 0, 0]

    def test_ring_mask_worked_out_by_hand(self):
        mask, ring = torch.tensor([10.0, 11, 12, 13, 14, 15]).view(1, 1, 1, 6), torch.empty(1, 1, 4, 1)
        full = {3: [10, 11, 12, 13], 4: [14, 11, 12, 13], 5: [14, 15, 12, 13]}
        for last, expected in full.items():
            assert torch.ops.kvpass.ring_mask(mask, torch.tensor([last]), ring).flatten().tolist() == expected
        assert torch.ops.kvpass.ring_mask(mask, torch.tensor([1]), ring).flatten().tolist()[:2] == [10, 11]


LENGTHS = {
    "prompt inside the window, token by token": [8] + [1] * 92,
    "prompt longer than the ring": [60] + [1] * 40,
    "token by token from the start": [1] * 100,
    "short chunks across the ring's end": [30, 20, 33, 1, 1, 7, 8],
    "chunks longer than the spare slots": [40, 34, 1, 1, 24],
    "a chunk longer than the ring": [3, 60, 1, 5, 31],
}


@pytest.mark.parametrize("padded", [False, True], ids=["", "left padding"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("make", [_mistral, _llama4], ids=["sliding", "chunked and full"])
def test_a_ring_equals_transformers_own_window(make, ids, lengths, padded):
    model, mask = make(), torch.ones_like(ids)
    if padded:
        mask[1, :2], mask[2, :9] = 0, 0
        lengths = [12 if lengths[0] < 12 else lengths[0], *lengths[1:]]
    cache = QuantizedCache(model.config, "bf16", max_cache_len=LONGEST)
    if make is _mistral:
        poisoned(cache)
    assert cache.layers[0].slots == SLOTS and cache.layers[0].is_ring
    ours = logits(model, cache, ids, lengths, mask if padded else None)
    theirs = logits(model, Rounded(config=model.config), ids, lengths, mask if padded else None)
    seen = mask[:, : sum(lengths)].bool()
    # Logits reach 7. A K or V of the second layer that rounds the other way to bf16 moves one by about 1e-3.
    torch.testing.assert_close(ours[seen], theirs[seen], rtol=0, atol=1e-2)


def test_what_a_ring_stores(mistral, ids):
    """The same tokens are stored in the same slots however they came."""
    at_once, one_by_one = (QuantizedCache(mistral.config, "nvfp4", max_cache_len=LONGEST) for _ in range(2))
    key, value = torch.randn(2, 3, 2, 100, 16, generator=torch.Generator().manual_seed(0))
    layer, other = at_once.layers[0], one_by_one.layers[0]
    layer.update(key, value)
    for i in range(100):
        other.update(key[:, :, i : i + 1], value[:, :, i : i + 1])
    assert torch.equal(layer.key.codes, other.key.codes)
    tokens = torch.arange(100 - SLOTS, 100)
    assert torch.equal(layer.keys[:, :, tokens], other.keys[:, :, tokens]) and layer.keys[:, :, tokens].any(-1).all()
    assert not layer.keys[:, :, : 100 - SLOTS].any() and not layer.keys[:, :, 100:].any()


def test_a_short_cache_is_no_ring(mistral):
    cache = QuantizedCache(mistral.config, "nvfp4", max_cache_len=40)
    assert not cache.layers[0].is_ring and cache.layers[0].slots == 40 and cache.is_sliding == [True, True]


def test_the_newest_are_kept_in_a_ring_too(mistral, ids):
    """Its slots are a multiple of them, so that each finds its row whichever way round the ring is."""
    cache = QuantizedCache(mistral.config, {"format": "nvfp4", "keep_first": 4, "keep_last": 7}, max_cache_len=LONGEST)
    exact = QuantizedCache(mistral.config, "bf16", max_cache_len=LONGEST)
    ours, theirs = cache.layers[0], exact.layers[0]
    assert ours.slots == 49 and theirs.slots == SLOTS and ours.is_ring
    length = 0
    for piece in (30, 1, 18, 1, 1, 47, 3):
        for held in (cache, exact):
            logits(mistral, held, ids, [piece], start=length)
        length += piece
        newest = slice(max(0, length - 7), length)
        assert torch.equal(ours.keys[:, :, newest], theirs.keys[:, :, newest].bfloat16().float())
        older = slice(max(0, length - 16), max(0, length - 7))
        assert not torch.equal(ours.keys[:, :, older], theirs.keys[:, :, older])


def test_bytes_of_a_ring(mistral):
    cache = QuantizedCache(mistral.config, "fp8_e4m3", max_cache_len=4096)
    cache.early_initialization(3, 2, 16, torch.bfloat16, torch.device("cpu"))
    assert cache.nbytes == 2 * 2 * 3 * 2 * SLOTS * 16


class TestCrop:
    def test_a_draft_is_forgotten(self, mistral, ids):
        cache = QuantizedCache(mistral.config, "nvfp4", max_cache_len=LONGEST)
        logits(mistral, cache, ids, [60, *[1] * 10])
        expected = logits(mistral, copy.deepcopy(cache), ids, [1] * 8, start=70)
        logits(mistral, cache, ids.flip(1), [20], start=70)
        logits(mistral, cache, ids.flip(1), [12], start=90)
        cache.crop(-SPARE_SLOTS)
        assert int(cache.get_seq_length()) == 70
        assert torch.equal(logits(mistral, cache, ids, [1] * 8, start=70), expected)

    def test_more_than_the_window_can_give_back(self, mistral, ids):
        cache = QuantizedCache(mistral.config, "nvfp4", max_cache_len=LONGEST)
        logits(mistral, cache, ids, [60, *[1] * 10])
        with pytest.raises(ValueError, match="cannot remove 33 tokens: a window of 16 has lost .* At most 32"):
            cache.crop(-SPARE_SLOTS - 1)
        assert int(cache.get_seq_length()) == 70
        cache.crop(-20)
        cache.crop(-12)  # the newest token ever stored counts, not the newest there is
        with pytest.raises(ValueError, match="cannot remove 1 tokens"):
            cache.crop(-1)

    def test_before_the_ring_is_full_anything_goes(self, mistral, ids):
        cache = QuantizedCache(mistral.config, "nvfp4", max_cache_len=LONGEST)
        expected = logits(mistral, cache, ids, [8, *[1] * 32])
        cache.crop(-32)
        assert torch.equal(logits(mistral, cache, ids, [1] * 32, start=8), expected[:, 8:])


def test_beams_are_reordered_in_place(mistral, ids):
    cache = QuantizedCache(mistral.config, "nvfp4", max_cache_len=LONGEST)
    logits(mistral, cache, ids, [60, *[1] * 10])
    codes = cache.layers[0].key.codes
    keys = cache.layers[0].keys
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.layers[0].key.codes is codes and torch.equal(cache.layers[0].keys, keys[[2, 0, 0]])


def fused_step(model, found):
    """The model, compiled with the pass alone: nothing is generated, the rewritten graph runs as it is."""

    def backend(gm, inputs):
        found["matches"] = find_sites(gm.graph)
        rewrite(gm, [match for match in found["matches"] if isinstance(match, Site)], kvpass.KVQuantConfig())
        found["targets"] = [node.target for node in gm.graph.nodes]
        return gm

    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("config", [*FORMATS, {"format": "nvfp4", "keep_first": 2, "keep_last": 5}], ids=str)
def test_fused_equals_unfused_on_the_same_bytes(mistral, ids, config):
    found = {}
    step = fused_step(mistral, found)
    cache = poisoned(QuantizedCache(mistral.config, config, max_cache_len=LONGEST))
    logits(mistral, cache, ids, [8])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for start in range(8, 100):
            compared = start < 18 or start in range(46, 52) or start > 95  # filling the window, then the ring
            expected = logits(mistral, copy.deepcopy(cache), ids, [1], start=start) if compared else None
            fused = logits(step, cache, ids, [1], start=start)
            if expected is not None:
                torch.testing.assert_close(fused, expected, rtol=1e-3, atol=1e-3)
    assert [type(match) for match in found["matches"]] == [Site, Site]
    assert counters["stats"]["unique_graphs"] == 1
    assert found["targets"].count(ATTENTION) == 2
    assert not {SDPA, DEQUANTIZE, UNROLL} & set(found["targets"])


@pytest.mark.parametrize(("length", "fuses"), [(SPARE_SLOTS + 1, True), (SPARE_SLOTS + 2, False)])
def test_several_tokens_at_once(mistral, ids, length, fuses):
    found = {}
    step = fused_step(mistral, found)
    cache = QuantizedCache(mistral.config, "nvfp4", max_cache_len=LONGEST)
    logits(mistral, cache, ids, [60, 1, 1])
    expected = logits(mistral, copy.deepcopy(cache), ids, [length], start=62)
    torch.testing.assert_close(logits(step, cache, ids, [length], start=62), expected, rtol=1e-3, atol=1e-3)
    assert [type(match) for match in found["matches"]] == [Site if fuses else Rejected] * 2
    if not fuses:
        assert "more tokens are added at once than it has spare slots for" in found["matches"][0].reason


@pytest.mark.parametrize("columns", [None, WINDOW, LONGEST - 1])
def test_a_mask_that_does_not_say_where_the_window_is(columns):
    """Fused, every slot of the ring would be seen, or other tokens than the mask means."""

    class Attend(torch.nn.Module):
        def forward(self, query, key, value, layer, mask):
            key, value = layer.update(key, value)
            if columns is not None:
                key, value = key[:, :, :columns, :], value[:, :, :columns, :]
            return SDPA(query, key, value, attn_mask=mask)

    found = {}
    layer = QuantizedCache(_mistral().config, "bf16", max_cache_len=LONGEST).layers[0]
    layer.update(*torch.randn(2, 3, 2, 5, 16))
    mask = None if columns is None else torch.ones(1, 1, 1, columns, dtype=torch.bool)
    fused_step(Attend(), found)(*torch.randn(3, 3, 2, 1, 16), layer, mask)
    (match,) = found["matches"]
    reason = "without a mask over all positions" if columns is None else "a slice of the cache"
    assert isinstance(match, Rejected) and reason in match.reason


def test_generate_crosses_the_window_in_one_graph(mistral, ids):
    kvpass.enable(mistral, kvpass.KVQuantConfig("bf16", strict=True))
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch._dynamo.config.patch(error_on_recompile=True):
        fused = mistral.generate(ids[:, :20], **settings)
    assert counters["stats"]["unique_graphs"] == 1 and kvpass.report(mistral).fused == 2
    again = mistral.generate(ids[:, :20], **settings)  # into the same buffers
    assert torch.equal(fused, again) and counters["stats"]["unique_graphs"] == 1
    with pytest.raises(ValueError, match="11 tokens do not fit: the cache holds 90 of at most 100"):
        logits(mistral, QuantizedCache(mistral.config, max_cache_len=100), ids, [90, 11])
