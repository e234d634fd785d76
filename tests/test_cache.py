"""QuantizedCache as a transformers cache, in eager mode."""

import pytest
import torch
from einops import rearrange
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MoshiConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvpass import ops, reference
from kvpass.architecture import rotary_frequencies
from kvpass.cache import QuantizedCache
from kvpass.config import PRESETS, KVQuantConfig
from kvpass.first_tokens import learn, turns
from kvpass.formats import KVFormat, format_names, get_format, register_format
from kvpass.reference import centre_of, scale_of
from kvpass.scale_files import Scale
from kvpass.scales import KVScales, LayerScales

FORMATS = format_names()[:5]


def logits(model, cache, *chunks, **kwargs):
    """Logits of every chunk of token ids, one after the other through the same cache."""
    with torch.no_grad():
        return torch.cat([model(ids, past_key_values=cache, **kwargs).logits for ids in chunks], 1)


@pytest.fixture
def ids():
    return torch.randint(0, 512, (3, 24), generator=torch.Generator().manual_seed(1))


def steps(ids, start):
    return [ids[:, i : i + 1] for i in range(start, ids.shape[1])]


def test_bf16_equals_the_static_cache(tiny_llama, ids):
    model = tiny_llama(dtype=torch.bfloat16)
    chunks = [ids[:, :9], ids[:, 9:13], *steps(ids, 13)]
    ours = logits(model, QuantizedCache(model.config, "bf16", max_cache_len=32), *chunks)
    theirs = logits(model, StaticCache(config=model.config, max_cache_len=32), *chunks)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * theirs.abs().max().item())


@pytest.mark.parametrize("name", FORMATS)
def test_attention_sees_what_the_bytes_decode_to(tiny_llama, ids, name):
    """The same logits come from a bf16-free model of the cache: plain tensors, quantized and decoded token by token."""
    model, fmt = tiny_llama(), get_format(name)
    cache, past = QuantizedCache(model.config, name, max_cache_len=32), {}

    class Simulated(StaticCache):
        def update(self, key, value, layer_idx, *args, **kwargs):
            keys, values = super().update(key, value, layer_idx, *args, **kwargs)
            old = past.setdefault(layer_idx, key.shape[2])
            start = 0 if key.shape[2] > 1 and old == key.shape[2] else past[layer_idx]
            for stored, new in ((keys, key), (values, value)):
                buffers = fmt.allocate(*new.shape, device="cpu")
                reference.write(buffers, fmt, new, torch.arange(new.shape[2]))
                stored[:, :, start : start + new.shape[2]] = reference.dequantize(buffers, fmt, new.dtype)
            past[layer_idx] = start + new.shape[2]
            return (key, value) if start == 0 else (keys, values)

        def get_mask_sizes(self, query_length, layer_idx=0):
            return cache.get_mask_sizes(query_length, layer_idx)

    ours = [logits(model, cache, ids[:, :9])]
    simulated = Simulated(config=model.config, max_cache_len=32)
    cache.reset()
    theirs = [logits(model, simulated, ids[:, :9])]
    logits(model, cache, ids[:, :9])
    for step in steps(ids, 9):
        theirs.append(logits(model, simulated, step))
        ours.append(logits(model, cache, step))
    torch.testing.assert_close(torch.cat(ours, 1), torch.cat(theirs, 1))


def test_first_prefill_is_exact(tiny_llama, ids):
    model = tiny_llama()
    exact = logits(model, StaticCache(config=model.config, max_cache_len=32), ids)
    ours = logits(model, QuantizedCache(model.config, "fp4_mx_block16", max_cache_len=32), ids)
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize(
    ("name", "per_token"),
    [("bf16", 512), ("fp8_e4m3", 256), ("fp8_e5m2", 256), ("nvfp4", 144), ("fp4_mx_block16", 144)],
)
def test_bytes_as_allocated(tiny_llama, name, per_token):
    model = tiny_llama()
    cache = QuantizedCache(model.config, name, max_cache_len=64)
    assert cache.nbytes == 0
    cache.early_initialization(3, 2, 64, torch.bfloat16, torch.device("cpu"))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for layer in cache.layers
        for t in (layer.key.codes, layer.value.codes, layer.key.block_scale, layer.value.block_scale)
        if t is not None
    }
    assert sum(storages.values()) == cache.nbytes == 2 * 3 * 64 * per_token


def test_poisoned_slots_do_not_matter(tiny_llama, ids):
    model = tiny_llama()
    clean, poisoned = (QuantizedCache(model.config, "nvfp4", max_cache_len=40) for _ in range(2))
    poisoned.early_initialization(3, 2, 64, torch.float32, torch.device("cpu"))
    for layer in poisoned.layers:
        for tensor in (layer.key.codes, layer.value.codes, layer.key.block_scale, layer.value.block_scale):
            tensor.fill_(0xFF)
    chunks = [ids[:, :7], *steps(ids, 7)]
    assert torch.equal(logits(model, clean, *chunks), logits(model, poisoned, *chunks))


def test_each_row_of_a_left_padded_batch_gets_what_it_gets_alone(tiny_llama, ids):
    model, lengths = tiny_llama(), (24, 17, 9)
    mask = torch.stack([torch.arange(24) >= 24 - n for n in lengths]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, attention_mask=mask[:, :20], position_ids=positions[:, :20])
        together = [
            model(
                ids[:, i : i + 1],
                past_key_values=cache,
                attention_mask=mask[:, : i + 1],
                position_ids=positions[:, i : i + 1],
            )
            for i in range(20, 24)
        ]
    together = torch.cat([out.logits for out in together], 1)
    for row, n in enumerate(lengths):
        own = ids[row : row + 1, 24 - n :]
        alone = logits(model, QuantizedCache(model.config, "nvfp4", max_cache_len=32), own[:, :-4], *steps(own, n - 4))
        torch.testing.assert_close(together[row], alone[0, -4:], rtol=1e-4, atol=1e-4)


def test_reset_and_crop(tiny_llama, ids):
    model = tiny_llama()
    cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
    chunks = [ids[:, :9], *steps(ids, 9)]
    first = logits(model, cache, *chunks)
    assert int(cache.get_seq_length()) == 24
    cache.crop(-5)
    assert int(cache.get_seq_length()) == 19
    assert torch.equal(logits(model, cache, *steps(ids, 19)), first[:, 19:])
    cache.reset()
    assert int(cache.get_seq_length()) == 0 and cache.eager_reads == 0
    assert torch.equal(logits(model, cache, *chunks), first)
    with pytest.raises(ValueError, match=r"crop\(-3\) removes 3"):
        cache.crop(3)
    with pytest.raises(ValueError, match="cannot remove 25 tokens from a cache that holds 24"):
        cache.crop(-25)


def test_batch_operations(tiny_llama, ids):
    model = tiny_llama()
    cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
    logits(model, cache, ids[:, :9])
    decoded = [(layer.keys, layer.values) for layer in cache.layers]
    pointers = [layer.key.codes.data_ptr() for layer in cache.layers]

    def holds(index):
        return all(
            torch.equal(layer.keys, keys[index]) and torch.equal(layer.values, values[index])
            for layer, (keys, values) in zip(cache.layers, decoded, strict=True)
        )

    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert holds([2, 0, 0]) and pointers == [layer.key.codes.data_ptr() for layer in cache.layers]
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert holds([2, 0]) and cache.batch_size == 2
    cache.batch_repeat_interleave(2)
    assert holds([2, 2, 0, 0]) and cache.batch_size == 4


def test_a_format_of_ones_own(tiny_llama, ids):
    register_format(KVFormat("test_cache_mxfp4", "e2m1", block_scale="e8m0", block=32))
    model = tiny_llama()
    cache = QuantizedCache(model.config, "test_cache_mxfp4", max_cache_len=32)
    out = logits(model, cache, ids[:, :9], *steps(ids, 9))
    assert out.isfinite().all() and cache.nbytes == 2 * 3 * 32 * 2 * 2 * (32 + 2)


class TestErrorsComeBeforeAnythingIsOverwritten:
    def unchanged(self, cache, call, error, message):
        before = [layer.key.codes.clone() for layer in cache.layers]
        length = int(cache.get_seq_length())
        with pytest.raises(error, match=message):
            call()
        assert all(map(torch.equal, before, [layer.key.codes for layer in cache.layers]))
        assert int(cache.get_seq_length()) == length

    def test_no_room(self, tiny_llama, ids):
        model = tiny_llama()
        cache = QuantizedCache(model.config, "nvfp4", max_cache_len=10)
        logits(model, cache, ids[:, :9])
        message = r"2 tokens do not fit: the cache holds 9 of at most 10; make it with max_cache_len=11"
        self.unchanged(cache, lambda: logits(model, cache, ids[:, 9:11]), ValueError, message)
        logits(model, cache, ids[:, 9:10])
        self.unchanged(cache, lambda: logits(model, cache, ids[:, 10:11]), ValueError, "1 tokens do not fit")

    def test_prompt_longer_than_the_cache(self, tiny_llama, ids):
        model = tiny_llama()
        with pytest.raises(ValueError, match="24 tokens do not fit: the cache holds 0 of at most 10"):
            logits(model, QuantizedCache(model.config, "nvfp4", max_cache_len=10), ids)

    def test_another_model(self, tiny_llama, ids):
        model, other = tiny_llama(), tiny_llama(num_key_value_heads=1)
        cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
        logits(model, cache, ids[:, :9])
        message = "got K with 1 heads of 64, but the cache was allocated for 2 heads of 64"
        self.unchanged(cache, lambda: logits(other, cache, ids[:, :1]), ValueError, message)

    def test_another_batch(self, tiny_llama, ids):
        model = tiny_llama()
        cache = QuantizedCache(model.config, "nvfp4", max_cache_len=32)
        logits(model, cache, ids[:, :9])
        message = "got a batch of 2, but the cache was allocated for a batch of 3"
        self.unchanged(cache, lambda: logits(model, cache, ids[:2, :1]), ValueError, message)


@pytest.mark.parametrize(
    ("config", "arguments", "error", "message"),
    [
        (LlamaConfig(head_dim=72), {}, ValueError, "cannot hold head_dim 72: it must be a multiple of 16"),
        (LlamaConfig(), {"format": "fp7"}, ValueError, "unknown KV format 'fp7'; known: bf16"),
        (LlamaConfig(), {"max_cache_len": 0}, ValueError, "max_cache_len is 0; it must be a whole number"),
        (LlamaConfig(), {"max_cache_len": 8.5}, ValueError, "max_cache_len is 8.5; it must be a whole number"),
        ("llama", {}, TypeError, r"expected the model's configuration \(model.config\), got str"),
        (MambaConfig(), {}, NotImplementedError, "mamba has no attention layers"),
        (MoshiConfig(), {}, NotImplementedError, "its masks leave the sliding window to the cache"),
        (T5Config(), {}, NotImplementedError, "use kvpass.QuantizedEncoderDecoderCache"),
    ],
)
def test_what_is_refused_when_the_cache_is_made(config, arguments, error, message):
    with pytest.raises(error, match=message):
        QuantizedCache(config, **arguments)


def test_flash_attention_is_refused():
    config = LlamaConfig()
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(NotImplementedError, match="attn_implementation='sdpa'"):
        QuantizedCache(config)


def scales_of(factors, format="fp8_e4m3"):
    """The same scale for K and V of each layer."""
    return KVScales.of(dict(enumerate(zip(factors, factors, strict=True))), format)


def filled(model, ids, config, max_cache_len=32):
    cache = QuantizedCache(model.config, config, max_cache_len=max_cache_len)
    logits(model, cache, ids[:, :9])
    return cache


class TestScales:
    @pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
    def test_one_layers_scale_reaches_its_write_path_and_no_other(self, tiny_llama, ids, name):
        """In a first prefill the attention is exact, so what each layer is given does not depend on the scales."""
        model, fmt = tiny_llama(num_hidden_layers=3), get_format(name)
        plain = filled(model, ids, KVQuantConfig(name, scales=scales_of([1.0, 1.0, 1.0], name)))
        changed = filled(model, ids, KVQuantConfig(name, scales=scales_of([1.0, [0.07, 0.11], 1.0], name)))
        for index, (a, b) in enumerate(zip(plain.layers, changed.layers, strict=True)):
            for one, other in ((a.key, b.key), (a.value, b.value)):
                same = all(torch.equal(x, y) for x, y in zip(one.tensors(), other.tensors(), strict=True))
                assert same == (index != 1)
        tensors = torch.tensor([0.07, 0.11])
        for buffers, x in ((changed.layers[1].key, plain.layers[1]), (changed.layers[1].value, plain.layers[1])):
            assert torch.equal(buffers.scale, tensors) and x.key.scale.tolist() == [1.0, 1.0]
        exact = filled(model, ids, "bf16").layers[1].keys[:, :, :9].float()
        codes, _ = reference.quantize(exact, fmt, tensors)
        stored = reference.to_interchange(changed.layers[1].key, 9)[0]
        assert (codes == stored).float().mean() > 0.9  # but for the rounding to bf16 of what it is compared with

    @pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
    def test_one_layers_scale_reaches_its_read_path_and_no_other(self, tiny_llama, ids, name):
        model = tiny_llama(num_hidden_layers=3)
        cache = filled(model, ids, name)
        before = [(layer.keys, layer.values) for layer in cache.layers]
        cache.layers[1].key.scale.mul_(2)
        for index, (layer, (keys, values)) in enumerate(zip(cache.layers, before, strict=True)):
            assert torch.equal(layer.keys, keys * 2 if index == 1 else keys) and torch.equal(layer.values, values)

    def test_set_in_place_once_the_cache_is_empty(self, tiny_llama, ids):
        model, new = tiny_llama(), scales_of([0.5, [0.25, 0.125]])
        cache = filled(model, ids, "fp8_e4m3")
        with pytest.raises(ValueError, match="holds tokens that were stored with its present scales; call reset"):
            cache.set_scales(new)
        addresses = [t.data_ptr() for layer in cache.layers for t in (layer.key.scale, layer.value.scale)]
        cache.reset()
        cache.set_scales(new)
        logits(model, cache, ids[:, :9])
        assert addresses == [t.data_ptr() for layer in cache.layers for t in (layer.key.scale, layer.value.scale)]
        expected = filled(model, ids, KVQuantConfig(scales=new))
        for a, b in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(a.key.codes, b.key.codes) and torch.equal(a.value.scale, b.value.scale)
        unused = QuantizedCache(model.config, max_cache_len=32)
        unused.set_scales(new)
        logits(model, unused, ids[:, :9])
        assert torch.equal(unused.layers[1].key.codes, expected.layers[1].key.codes)

    @pytest.mark.parametrize(
        ("scales", "message"),
        [
            (scales_of([1.0]), "scales has scales for layers 0, none for 1 of the model"),
            (scales_of([1.0] * 3), "scales has scales for layers 2, and the model's layers are 0-1"),
            (scales_of([1.0, [1.0] * 3]), "layer 1 has 3 scales for its key, and the model has 2 KV heads"),
            (scales_of([1.0] * 2).shard(0, 2), None),
            (KVScales(scales_of([1.0] * 2).layers, "qwen3"), "scales for a qwen3 model; this is a llama"),
            (KVScales.of({0: ((), ()), 1: ((), ())}, "bf16"), "scales made for 'bf16' hold none for 'fp8_e4m3'"),
        ],
    )
    def test_scales_of_another_model(self, tiny_llama, scales, message):
        config = tiny_llama().config
        if message is None:
            QuantizedCache(config, KVQuantConfig(scales=scales))
            return
        with pytest.raises(ValueError, match=message):
            QuantizedCache(config, KVQuantConfig(scales=scales))
        with pytest.raises(ValueError, match=message):
            QuantizedCache(config).set_scales(scales)

    def test_one_ranks_scales_for_all_heads(self, tiny_llama, ids):
        """Nothing is stored: the heads that a rank has are known at its first update."""
        model = tiny_llama()
        part = KVScales.of({i: ([1.0, 2.0, 3.0, 4.0], 1.0) for i in range(2)}).shard(0, 4)
        cache = QuantizedCache(model.config, KVQuantConfig(scales=part), max_cache_len=32)
        logits(model, cache, ids[:, :9])  # one scale is broadcast
        with pytest.raises(ValueError, match="2 scales for a layer of 4 KV heads; .*KVScales.shard"):
            get_format("nvfp4").allocate(1, 4, 8, 64, "cpu", torch.ones(2))

    def test_saturation(self, tiny_llama, ids):
        model = tiny_llama()
        assert QuantizedCache(model.config).saturation() == [(0.0, 0.0)] * 2
        for name, small in (("fp8_e4m3", 1e-3), ("nvfp4", 1e-6)):
            scales = KVScales.of({0: (1.0, 1.0), 1: (small, 1.0)}, name)
            (fine, _), (bad, value) = filled(model, ids, KVQuantConfig(name, scales=scales)).saturation()
            assert fine < 0.005 and value < 0.005 and bad > 0.5
        assert filled(model, ids, "fp4_mx_block16").saturation() == [(0.0, 0.0)] * 2


class TestFormatsByLayer:
    def test_each_layer_is_stored_in_its_own(self, tiny_llama, ids):
        model = tiny_llama(num_hidden_layers=4)
        layers = {1: "nvfp4", "2:4": {"key_format": "fp8_e5m2"}}
        cache = filled(model, ids, KVQuantConfig(layers=layers, skip_layers=[-1]))
        found = [(layer.key_format.name, layer.value_format.name) for layer in cache.layers]
        assert found == [("fp8_e4m3",) * 2, ("nvfp4",) * 2, ("fp8_e5m2", "fp8_e4m3"), ("bf16",) * 2]
        assert [layer.nbytes for layer in cache.layers] == [3 * 32 * n for n in (256, 144, 256, 512)]
        alone = [filled(model, ids, name) for name in ("fp8_e4m3", "nvfp4", "fp8_e5m2", "bf16")]
        for index, own in enumerate(alone):
            assert torch.equal(cache.layers[index].keys, own.layers[index].keys)

    def test_a_layer_that_the_model_does_not_have(self, tiny_llama):
        with pytest.raises(ValueError, match="layer '2' is none of the model's 2, 0 to 1"):
            QuantizedCache(tiny_llama().config, KVQuantConfig(skip_layers=[2]))

    def test_a_head_dim_that_one_layers_format_cannot_hold(self):
        register_format(KVFormat("test_cache_block32", "e2m1", block_scale="e8m0", block=32))
        with pytest.raises(ValueError, match="'test_cache_block32' cannot hold head_dim 80"):
            QuantizedCache(LlamaConfig(head_dim=80), KVQuantConfig("nvfp4", layers={3: "test_cache_block32"}))


class TestRotaryFrequencies:
    def test_are_those_of_the_model(self):
        scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
        scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        for parameters in ({"rope_type": "default", "rope_theta": 1e5}, scaled):
            config = LlamaConfig(hidden_size=128, num_attention_heads=4, rope_parameters=parameters)
            expected = LlamaRotaryEmbedding(config).inv_freq
            torch.testing.assert_close(torch.tensor(rotary_frequencies(config, 1)), expected)

    def test_by_type_of_layer(self):
        config = Gemma3TextConfig(num_hidden_layers=6, sliding_window_pattern=6)
        slow, fast = rotary_frequencies(config, 5), rotary_frequencies(config, 0)
        assert len(slow) == len(fast) == config.head_dim // 2 and slow[-1] < fast[-1] / 50

    def test_of_a_part_of_the_channels_or_of_none(self):
        config = GPTNeoXConfig(hidden_size=256, num_attention_heads=4)
        assert len(rotary_frequencies(config, 0)) == 8  # a quarter of 64 channels
        assert rotary_frequencies(GPT2Config(), 0) == ()


def keys_of(model, ids):
    """K of each layer, ``[batch, kv_heads, length, head_dim]``, as one prefill makes it."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    logits(model, cache, ids)
    return [layer.keys for layer in cache.layers]


class TestCentres:
    def test_are_the_mean_of_the_first_prefill_over_batch_and_tokens(self, tiny_llama):
        model, ids = tiny_llama(), torch.randint(0, 512, (2, 300))
        cache = filled(model, ids, "fp8_e4m3+centred", max_cache_len=400)
        logits(model, cache, ids)
        cache.reset()
        logits(model, cache, ids)
        for layer, keys in zip(cache.layers, keys_of(model, ids), strict=True):
            first = keys[:, :, :256].float()
            expected = centre_of(first, turns(rotary_frequencies(model.config, 0), 400, "cpu"))
            torch.testing.assert_close(layer.key.centre, expected)
            assert not torch.allclose(expected, first.mean((0, 2)), atol=1e-3)
            # And the tokens were stored around it: what is read is as near as the codes of what is left.
            error = (layer.keys[:, :, :300] - keys).abs().max()
            assert error <= (keys - layer.key.centre[:, None]).abs().max() / 16

    @pytest.mark.parametrize("pairs", ["(two pairs)", "(pairs two)"])
    def test_of_keys_turned_by_their_position_is_their_mean_over_all_positions(self, pairs):
        """Of either order of pairs, and whatever the rows and the channels that are not turned; a position p weighs
        p ** -0.5, the first 256 as the last of them."""
        frequencies = tuple(1e5 ** (-channel / 48) for channel in range(0, 48, 2))
        angle = torch.arange(8192)[:, None] * torch.tensor(frequencies)
        first, second = 3 * torch.randn(2, 2, 1, 24)
        turned = [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()]
        x = torch.cat([rearrange(turned, f"two kv length pairs -> kv length {pairs}"), torch.ones(2, 8192, 16)], -1)
        rows = torch.stack([0.5 * x, 1.5 * x]) + 0.1 * torch.randn(2, 2, 8192, 64)
        centre = centre_of(rows[:, :, :256], turns(frequencies, 8192, "cpu"))
        weight = torch.arange(8192).clamp(min=256)[:, None] ** -0.5
        torch.testing.assert_close(centre, (rows * weight).sum((0, 2)) / (2 * weight.sum()), atol=0.1, rtol=0)
        late = rows[:, :, 4096:]
        left = [(late - c[:, None]).square().mean() for c in (centre, rows[:, :, :256].mean((0, 2)))]
        assert left[0] < 0.8 * left[1]

    def test_of_keys_that_nothing_turns_is_their_mean(self):
        x, frequencies = torch.randn(2, 2, 300, 64) + 2 * torch.randn(2, 1, 64), tuple(2.0**-i for i in range(32))
        factors = turns(frequencies, 999, "cpu")
        for tokens in (x[:, :, :256], x[:, :, :9], x[:, :, :1]):
            torch.testing.assert_close(centre_of(tokens, factors), centre_of(tokens))
        config, narrow = KVQuantConfig("fp8_e4m3+centred").layer(0), x[..., :32]  # of another width
        key, value = config.allocate_like(narrow, narrow)
        learn(config._replace(frequencies=frequencies), key, value, narrow, narrow, 999)
        torch.testing.assert_close(key.centre, narrow[:, :, :256].mean((0, 2)))

    def test_each_head_is_turned_or_not_and_has_an_order_of_pairs_of_its_own(self):
        """Heads that are turned as halves, as neighbours, and not at all, each as if it were alone."""
        frequencies = tuple(1e4 ** (-i / 16) for i in range(16))
        angle = torch.arange(64)[:, None] * torch.tensor(frequencies)
        halves, neighbours = (
            rearrange([angle.cos(), angle.sin()], f"two t p -> t {to}") for to in ("(two p)", "(p two)")
        )
        x, factors = torch.stack([halves, neighbours, torch.ones(64, 32)])[None], turns(frequencies, 4096, "cpu")
        centre = centre_of(x, factors)
        torch.testing.assert_close(centre[0].view(2, 16), factors[0].T)
        torch.testing.assert_close(centre[1].view(16, 2), factors[0])
        torch.testing.assert_close(centre[2], torch.ones(32))
        for head in range(3):
            torch.testing.assert_close(centre_of(x[:, head : head + 1], factors)[0], centre[head])

    def test_slots_of_zeros_do_not_count(self):
        frequencies = tuple(1e4 ** (-i / 32) for i in range(32))
        angle = torch.arange(40)[:, None] * torch.tensor(frequencies)
        x = torch.cat([angle.cos() - angle.sin(), angle.sin() + angle.cos()], -1).expand(1, 2, 40, 64)
        padded, factors = torch.cat([x, torch.zeros(1, 2, 60, 64)], 2), turns(frequencies, 100, "cpu")
        is_written = torch.arange(100) < 40
        torch.testing.assert_close(centre_of(padded, factors, is_written), centre_of(x, factors))

    def test_stay_until_a_reset_and_are_taken_again_after_it(self, tiny_llama, ids):
        model = tiny_llama()
        cache = filled(model, ids, KVQuantConfig(key_format="nvfp4+centred"))
        centre, address = cache.layers[0].key.centre.clone(), cache.layers[0].key.centre.data_ptr()
        assert cache.layers[0].value.centre is None and centre.abs().min() > 0
        logits(model, cache, ids[:, 9:13], *steps(ids, 13))
        assert torch.equal(cache.layers[0].key.centre, centre)
        cache.reset()
        logits(model, cache, ids[:, 12:20])
        assert not torch.equal(cache.layers[0].key.centre, centre)
        assert cache.layers[0].key.centre.data_ptr() == address
        expected = QuantizedCache(model.config, KVQuantConfig(key_format="nvfp4+centred"), max_cache_len=32)
        logits(model, expected, ids[:, 12:20])
        assert torch.equal(cache.layers[0].keys, expected.layers[0].keys)

    def test_of_a_first_token_alone(self, tiny_llama, ids):
        model = tiny_llama()
        cache = QuantizedCache(model.config, "fp8_e4m3+centred", max_cache_len=32)
        logits(model, cache, ids[:1, :1], ids[:1, 1:9])
        key = keys_of(model, ids[:1, :1])[0]
        assert torch.equal(cache.layers[0].keys[:, :, :1], key)  # nothing is left of it but the centre
        assert torch.equal(cache.layers[0].key.centre, key[0, :, 0])

    def test_a_prefill_with_nan_leaves_zero_there(self, tiny_llama):
        cache = QuantizedCache(tiny_llama().config, "fp8_e4m3+centred", max_cache_len=32)
        x = torch.randn(1, 2, 5, 64)
        x[0, 1, 2, 7] = torch.nan
        cache.layers[0].update(x, x)
        key, value = cache.layers[0].key.centre, cache.layers[0].value.centre
        assert value[1, 7] == 0 and (value != 0).sum() == 127
        assert key[1, 7] == 0 and key.isfinite().all() and (key != 0).sum() >= 126  # and what it was turned with

    def test_given_centres_are_subtracted_and_added(self, tiny_llama, ids):
        model = tiny_llama()
        rows = torch.randn(2, 2, 64).tolist()
        scale = Scale((0.02,), "fp8_e4m3", tuple(map(tuple, rows[0])))
        other = Scale((0.02,), "fp8_e4m3", tuple(map(tuple, rows[1])))
        scales = KVScales((LayerScales(0, scale, other), LayerScales(1, scale, Scale((0.02,)))))
        cache = filled(model, ids, KVQuantConfig.from_scales(scales))
        layer = cache.layers[0]
        assert torch.equal(layer.key.centre, torch.tensor(rows[0])) and cache.layers[1].value.centre is None
        assert torch.equal(layer.value.centre, torch.tensor(rows[1]))
        exact = filled(model, ids, "bf16").layers[0]
        codes, _ = reference.quantize(
            exact.keys[:, :, :9].float() - layer.key.centre[:, None], get_format("fp8_e4m3"), layer.key.scale
        )
        assert (codes == layer.key.codes[:, :, :9]).float().mean() > 0.9  # but for the rounding to bf16 of `exact`
        plain = filled(model, ids, KVQuantConfig("fp8_e4m3+centred"))
        assert not torch.equal(plain.layers[0].key.centre, layer.key.centre)

    def test_cannot_be_changed_under_tokens(self, tiny_llama, ids):
        model = tiny_llama()
        scale = Scale((1.0,), "fp8_e4m3+centred", ((1.0,) * 64,) * 2)
        scales = KVScales(tuple(LayerScales(i, scale, scale) for i in range(2)))
        cache = filled(model, ids, "fp8_e4m3+centred")
        with pytest.raises(ValueError, match="holds tokens that were stored with its present scales; call reset"):
            cache.set_scales(scales)
        with pytest.raises(ValueError, match="holds tokens that were stored with its present scales; call reset"):
            cache.layers[0].set_scales(cache.layers[0].config)
        cache.reset()
        cache.set_scales(scales)
        logits(model, cache, ids[:, :9])
        assert (cache.layers[1].key.centre == 1).all()

    def test_one_of_another_head_dim(self, tiny_llama, ids):
        scale = Scale((1.0,), "fp8_e4m3", ((1.0,) * 32,) * 2)
        scales = KVScales(tuple(LayerScales(i, scale, scale) for i in range(2)))
        with pytest.raises(ValueError, match=r"a centre of shape \[2, 32\] for a layer of 2 KV heads of 64 values"):
            filled(tiny_llama(), ids, KVQuantConfig.from_scales(scales))


class TestLearntScales:
    """The tensor scales that nvfp4 takes from the first tokens where nobody gives them."""

    def test_by_hand(self):
        x = torch.zeros(2, 3, 5, 16)
        x[1, 0, 4, 7], x[0, 0, 0, 0] = -3.0, 0.5  # the power of two below is 2
        x[0, 1, 1, 3] = 2.0**-9
        assert scale_of(x).tolist() == [2 / 16, 2.0**-13, 1.0]
        assert torch.equal(scale_of(x[:, 1:]), scale_of(x)[1:])  # a tensor-parallel rank has heads of its own
        x[0, 0, 1], x[0, 1, 2, 5], x[1, 2, 0, 1] = torch.nan, torch.inf, -torch.inf
        assert scale_of(x).tolist() == [2 / 16, 2.0**-13, 1.0]
        # Less a centre: 3 is left of 100, and 6.25 is the sixteenth that counts at least.
        x = torch.full((1, 1, 2, 16), 97.0)
        x[0, 0, 1] = 103.0
        assert scale_of(x, centre=torch.full((1, 16), 100.0)).tolist() == [4 / 16]
        assert scale_of(x, 1 / 256).tolist() == [64 / 256]
        assert scale_of(x[:, :, :1], centre=x[:, 0, 0]).tolist() == [4 / 16]  # nothing is left of a single token
        assert scale_of(torch.full((1, 1, 1, 16), 2.0**-140)).tolist() == [2.0**-104]

    @pytest.mark.parametrize("largest", [0.011, 1.0, 3.99, 7000.0])
    def test_brings_block_scales_to_the_middle_of_their_range(self, tiny_llama, largest):
        cache = QuantizedCache(tiny_llama().config, "nvfp4", max_cache_len=64)
        x = torch.randn(2, 2, 9, 64)
        x *= largest / x.abs().amax((0, 2, 3), keepdim=True)
        cache.layers[0].update(x, x)
        rows = reference.scale_rows(cache.layers[0].value.block_scale, 9).view(torch.float8_e4m3fn).float()
        assert all(2.5 <= head <= 5.5 for head in rows.amax((0, 2, 3)).tolist())
        # What comes later fits up to 84 times as large; with a scale for the amax itself next to nothing would.
        cache.layers[0].update(80 * x, 80 * x)
        assert cache.layers[0].saturation() == (0.0, 0.0)
        cache.layers[0].update(400 * x, 400 * x)
        assert min(cache.layers[0].saturation()) > 0

    @pytest.mark.parametrize("name", ["nvfp4", "nvfp4+centred+rotated+sweep", "int8+centred"])
    def test_make_small_values_as_good_as_any(self, tiny_llama, name):
        """A power of two in K and V is a power of two in what is read, to the bit."""
        config, x = tiny_llama().config, torch.randn(2, 2, 9, 64)
        read = []
        for factor in (1.0, 2.0**-12, 2.0**9):
            layer = QuantizedCache(config, name, max_cache_len=16).layers[0]
            layer.update(factor * x, factor * x)
            read.append((layer.keys / factor, layer.values / factor))
        assert all(torch.equal(read[0][side], other[side]) for other in read[1:] for side in range(2))
        assert float((read[0][1][:, :, :9] - x).norm() / x.norm()) < 0.12
        given = KVQuantConfig(name, scales=scales_of([1.0, 1.0], name))
        lost = QuantizedCache(config, given, max_cache_len=16).layers[0]
        lost.update(2.0**-12 * x, 2.0**-12 * x)
        assert float((lost.values[:, :, :9] - 2.0**-12 * x).norm() / (2.0**-12 * x).norm()) > 0.5

    def test_come_from_the_first_tokens_of_each_head(self, tiny_llama):
        layer = QuantizedCache(tiny_llama().config, {"key_format": "fp8_e4m3", "value_format": "nvfp4"}, 600).layers[0]
        x = torch.randn(1, 2, 300, 64).clamp(-0.9, 0.9)
        x[:, :, 7, 0], x[:, 1, 7, 0], x[:, :, 256:] = 3.0, 40.0, 90.0
        layer.update(x, x)
        assert layer.value.scale.tolist() == [2 / 16, 32 / 16]
        assert layer.key.scale.tolist() == [1.0, 1.0]

    def test_stay_until_a_reset_and_are_taken_again_after_it(self, tiny_llama):
        layer, x = QuantizedCache(tiny_llama().config, "nvfp4", 64).layers[0], torch.full((1, 2, 8, 64), 1.5)
        layer.update(x, x)
        scale, address = layer.key.scale.clone(), layer.key.scale.data_ptr()
        assert scale.tolist() == [1 / 16, 1 / 16]
        layer.update(10 * x, 10 * x)
        layer.update(100 * x[:, :, :1], 100 * x[:, :, :1])
        assert torch.equal(layer.key.scale, scale)
        layer.crop(-17)  # all of it: what is stored next goes on from there
        layer.update(10 * x, 10 * x)
        assert torch.equal(layer.key.scale, scale)
        layer.reset()
        layer.update(100 * x, 100 * x)
        assert layer.key.scale.tolist() == [128 / 16, 128 / 16] and layer.key.scale.data_ptr() == address

    def test_given_scales_win(self, tiny_llama, ids):
        model = tiny_llama()
        cache = filled(model, ids, KVQuantConfig("nvfp4", scales=scales_of([1.0, [0.5, 0.03]], "nvfp4")))
        assert [layer.value.scale.tolist() for layer in cache.layers] == [[1.0, 1.0], pytest.approx([0.5, 0.03])]
        learnt = filled(model, ids, "nvfp4")
        assert all(layer.key.scale.max() < 1 for layer in learnt.layers)
        learnt.reset()
        learnt.set_scales(scales_of([1.0, 1.0], "nvfp4"))
        logits(model, learnt, ids[:, :9])
        assert all(layer.key.scale.tolist() == [1.0, 1.0] for layer in learnt.layers)


class TestKeptTokens:
    def test_read_back_as_they_were(self, tiny_llama, ids):
        model = tiny_llama(dtype=torch.bfloat16)
        cache = filled(model, ids, KVQuantConfig("nvfp4", keep_first=4))
        plain, exact = filled(model, ids, "nvfp4"), filled(model, ids, "bf16")
        for layer, other, whole in zip(cache.layers, plain.layers, exact.layers, strict=True):
            for name in ("keys", "values"):
                read, quantized, true = (getattr(holder, name) for holder in (layer, other, whole))
                assert torch.equal(read[:, :, :4], true[:, :, :4])
                assert torch.equal(read[:, :, 4:], quantized[:, :, 4:])
                assert not torch.equal(quantized[:, :, :4], true[:, :, :4])
            assert layer.nbytes == other.nbytes + 2 * 3 * 2 * 4 * 64 * 2

    def test_the_newest_are_kept_until_newer_ones_come(self, tiny_llama, ids):
        model = tiny_llama(dtype=torch.bfloat16)
        cache = filled(model, ids, KVQuantConfig("nvfp4", keep_first=2, keep_last=3))
        plain, exact = filled(model, ids, "nvfp4"), filled(model, ids, "bf16")
        layers = [held.layers[0] for held in (cache, plain, exact)]  # the first: what it is given is alike for all

        def kept():
            read, quantized, true = (layer.keys[:, :, : int(cache.get_seq_length())] for layer in layers)
            is_exact, is_quantized = ((read == other).all(-1).all(1).all(0) for other in (true, quantized))
            assert (is_exact | is_quantized).all()
            return is_exact.nonzero().flatten().tolist()

        assert kept() == [0, 1, 6, 7, 8]
        for start, stop, expected in ((9, 10, [0, 1, 7, 8, 9]), (10, 12, [0, 1, 9, 10, 11])):
            for held in (cache, plain, exact):
                logits(model, held, ids[:, start:stop])
            assert kept() == expected
        for held in (cache, plain, exact):
            held.crop(-2)
        assert kept() == [0, 1, 9]  # those that 10 and 11 took the rows of are quantized from now on
        for held in (cache, plain, exact):
            logits(model, held, ids[:, :1])
        assert kept() == [0, 1, 9, 10]

    def test_follow_the_rows_of_the_batch(self, tiny_llama, ids):
        cache = filled(tiny_llama(), ids, KVQuantConfig("nvfp4", keep_first=2, keep_last=2))
        before = cache.layers[0].keys
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert torch.equal(cache.layers[0].keys, before[[2, 0, 0]])
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        assert torch.equal(cache.layers[0].keys, before[[0, 0]])

    def test_layers_in_bf16_keep_nothing_twice(self, tiny_llama, ids):
        cache = filled(tiny_llama(), ids, KVQuantConfig("nvfp4", keep_first=4, skip_layers=[0]))
        assert cache.layers[0].key.kept is None and cache.layers[1].key.kept.shape == (3, 2, 4, 64)


def qwen_with_large_biases(level):
    """A Qwen2 whose k_proj has a bias of ``level`` in channels that rotary embedding hardly turns, and that matter."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention, channels = layer.self_attn, [13, 14, 15, 29, 30, 31]
            attention.k_proj.bias.view(2, 32)[:, channels] = level * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
            attention.k_proj.weight.view(2, 32, -1)[:, channels] *= 3
            attention.q_proj.weight.view(4, 32, -1)[:, channels] *= 3
    return model


def test_every_preset_takes_outliers_in_keys_without_calibration(capsys):
    """As in Qwen2.5, whose k_proj biases reach into the hundreds."""
    ids = torch.randint(0, 512, (8, 80), generator=torch.Generator().manual_seed(3))

    def error(level, config):
        model = qwen_with_large_biases(level)
        cache = QuantizedCache(model.config, config, max_cache_len=80)
        with torch.no_grad():
            exact = model(ids).logits[:, 24:]
        ours = logits(model, cache, ids[:, :24], *ids[:, 24:].split(1, 1))[:, 24:]  # singly, as generate does
        return float((ours - exact).norm() / exact.norm())

    broken = {level: error(level, "fp8_e4m3") for level in (0, 150)}
    shown = [f"fp8_e4m3 {broken[0]:.2f}, {broken[150]:.2f}"]
    for preset in PRESETS:
        usual, large = error(0, preset), error(150, preset)
        shown.append(f"{preset} {usual:.2f}, {large:.2f}")
        assert large < 1.1 * usual and large < broken[150] / 2.5
    assert broken[150] > 4 * broken[0]
    with capsys.disabled():
        print(f"\nrelative logit error without, and with biases of 150 in K: {'; '.join(shown)}")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_counts_its_own_tokens_within_a_forward(tiny_llama, compiled):
    """Position biases are made by each layer from the length of its cache, before it stores what is new."""
    config = tiny_llama().config
    cache = QuantizedCache(config, "bf16", max_cache_len=16)
    x = torch.randn(1, config.num_key_value_heads, 3, config.head_dim)

    def forward(x):
        seen = []
        for index in range(len(cache)):
            before = cache.get_seq_length(index) + 0
            cache.update(x, x, index)
            seen.append((before, cache.get_seq_length(index) + 0))
        return seen

    forward(x)
    step = torch.compile(forward, backend="eager") if compiled else forward
    for length in (3, 4, 5):
        assert [(int(a), int(b)) for a, b in step(x[:, :, :1])] == [(length, length + 1)] * len(cache)


class TestPositions:
    """Those of a forward are worked out once for all layers of a device."""

    @pytest.fixture
    def stored_at(self, monkeypatch):
        """The positions of each call of ``ops.store``."""
        calls, store = [], ops.store
        monkeypatch.setattr(
            ops, "store", lambda key, value, at, *rest: (calls.append(at), store(key, value, at, *rest))
        )
        return calls

    def test_are_shared_by_the_layers_of_a_forward(self, tiny_llama, stored_at):
        layers, x = QuantizedCache(tiny_llama().config, "fp8_e4m3", 32).layers, torch.randn(1, 2, 5, 64)
        for length in (5, 3, 3):
            for layer in layers:
                layer.update(x[:, :, :length], x[:, :, :length])
        assert [at.tolist() for at in stored_at[::2]] == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10]]
        assert torch.equal(stored_at[0], stored_at[1])  # of a layer that has no part in the counter before
        assert stored_at[2] is stored_at[3] and stored_at[4] is stored_at[5]

    @pytest.mark.parametrize("then", ["compiled", "cropped", "of another length"])
    def test_of_a_forward_that_did_not_reach_a_layer_are_not_used(self, tiny_llama, stored_at, then):
        (lead, layer), x = QuantizedCache(tiny_llama().config, "fp8_e4m3", 32).layers, torch.randn(1, 2, 3, 64)
        for one in (lead, layer, lead):
            one.update(x, x)
        if then == "compiled":
            torch.compile(lead.update, backend="eager")(x, x)
        elif then == "cropped":
            for one in (lead, layer):
                one.crop(-2)
        else:
            x = x[:, :, :2]
        layer.update(x, x)
        expected = {"compiled": [6, 7, 8], "cropped": [1, 2, 3], "of another length": [4, 5]}
        assert stored_at[-1].tolist() == expected[then]


def test_nothing_runs_where_nothing_is_learnt(tiny_llama, monkeypatch):
    learnt, x = [], torch.randn(1, 2, 5, 64)
    monkeypatch.setattr(ops, "learn", lambda *args: learnt.append(args))
    given = KVQuantConfig("nvfp4", scales=scales_of([1.0, 1.0], "nvfp4"))
    for config in ("bf16", "fp8_e4m3+rotated", given, "nvfp4", "fp8_e4m3+centred"):
        QuantizedCache(tiny_llama().config, config, 16).layers[0].update(x, x)
        assert bool(learnt) == (config in ("nvfp4", "fp8_e4m3+centred"))
        learnt.clear()


def test_a_forward_that_was_interrupted_leaves_no_layer_behind(tiny_llama):
    config = tiny_llama().config
    cache = QuantizedCache(config, "bf16", max_cache_len=16)
    x = torch.randn(1, config.num_key_value_heads, 3, config.head_dim)
    for index in range(len(cache)):
        cache.update(x, x, index)
    cache.update(x, x, 0)  # and an error before the next layer
    cache.crop(-3)
    assert [int(cache.get_seq_length(index)) for index in range(len(cache))] == [3] * len(cache)
    cache.update(x, x, 0)
    cache.reset()
    assert [int(cache.get_seq_length(index)) for index in range(len(cache))] == [0] * len(cache)
