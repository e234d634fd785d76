"""Flex attention over a cache: fused, it is what "eager" attention computes; or the reason why not."""

import copy

import pytest
import torch
from architectures import Architecture
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from trial import MIXED, _pass_alone

import kvpass
from kvpass.fx_passes.match import Exact, Rejected, Site
from kvpass.layers import QuantizedLayer

MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "Llama": Architecture("LlamaConfig", attention="eager"),
    "heads that are no power of two": Architecture(
        "LlamaConfig", {"num_attention_heads": 6, "hidden_size": 96}, attention="eager"
    ),
    "a window": Architecture("MistralConfig", attention="eager"),
    "softcap, windows and full": Architecture("Gemma2Config", MIXED_LAYERS, attention="eager"),
}
SLOTS, PROMPT, TOKENS = 40, 9, 30  # past the window, which is 16


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_is_as_with_eager_attention(name, device):
    model = MODELS[name].model().to(device)
    flex = copy.deepcopy(model)
    flex.set_attn_implementation("flex_attention")
    ids = torch.randint(4, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    mask = (torch.arange(SLOTS) >= torch.tensor([[0], [4]])).long().to(device)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)

    def call(which, cache, start, end):
        seen = mask[:, :end] if end <= PROMPT else mask
        inputs = {"attention_mask": seen, "position_ids": position_ids[:, start:end], "past_key_values": cache}
        return which(input_ids=ids[:, start:end], **inputs).logits

    cache = kvpass.QuantizedCache(model.config, MIXED, max_cache_len=SLOTS)
    call(model, cache, 0, PROMPT)
    matches = []
    step = torch.compile(flex, backend=_pass_alone(matches))
    for start in range(PROMPT, TOKENS):
        expected = call(model, copy.deepcopy(cache), start, start + 1)
        torch.testing.assert_close(call(step, cache, start, start + 1), expected, rtol=1e-3, atol=1e-4)
    assert [type(match) for match in matches] == [Site, Site], matches


def visible(length=1):
    """Two rows, of which the second hides its first three slots; the query's tokens are the newest of 12."""
    first, newest = torch.tensor([0, 3]), torch.tensor(12 - length)

    def mask_mod(batch, head, query, slot):
        return (slot <= query + newest) & (slot >= first[batch])

    return create_block_mask(mask_mod, B=2, H=None, Q_LEN=length, KV_LEN=32, device="cpu")


def dense():
    return (torch.arange(32) < 12) & (torch.arange(32) >= torch.tensor([[0], [3]]))[:, None, None]


BIAS = torch.linspace(-3, 3, 2 * 6 * 32).view(2, 6, 1, 32)
TABLE = torch.linspace(-2, 2, 12)  # shorter than the cache: of the slots that are visible alone
SLOPES = torch.linspace(0, 1, 6)
SLOT = torch.arange(32)


def softcap(score, *index):
    return 2.0 * torch.tanh(score / 2.0)


def biased(score, batch, head, query, slot):
    return score + BIAS[batch, head, query, slot]


def capped_and_biased(score, batch, head, query, slot):
    return BIAS[batch, head, query, slot] + torch.tanh(score / 2.0) * 2.0


def run(score_mod=None, block_mask=None, attend=None):
    """The result of attention over a quantized layer, compiled, what it was given, and what the pass found."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 12, 64, generator=generator) for heads in (6, 2, 2))
    layer = QuantizedLayer(MIXED.layer(0), 32)
    layer.update(key[:, :, :11], value[:, :, :11])
    query, new = query[:, :, 11:], (key[:, :, 11:], value[:, :, 11:])

    def plain(query, key, value):
        return flex_attention(query, key, value, score_mod, block_mask, scale=0.3, enable_gqa=True)

    matches = []

    @torch.compile(backend=_pass_alone(matches))
    def step(query, new):
        return (attend or plain)(query, *layer.update(*new))

    return step(query, new), (query, layer.keys, layer.values), matches


@pytest.mark.parametrize(
    ("score_mod", "cap", "bias"),
    [
        (None, 0.0, 0.0),
        (softcap, 2.0, 0.0),
        (lambda s, b, h, q, n: -2 * torch.tanh(s / -2), 2.0, 0.0),
        (biased, 0.0, BIAS),
        (capped_and_biased, 2.0, BIAS),
        (lambda s, b, h, q, n: s + (n > 6), 0.0, (SLOT > 6).float()),
        (lambda s, b, h, q, n: s + (n - 11), 0.0, SLOT - 11.0),
        (lambda s, b, h, q, n: s + SLOPES[h] * (n - 11), 0.0, SLOPES[:, None, None] * (SLOT - 11)),
        (lambda s, b, h, q, n: s + SLOPES[h], 0.0, 0.0),
        (lambda s, b, h, q, n: s + TABLE[n], 0.0, TABLE[SLOT.clamp(max=11)]),
        (lambda s, b, h, q, n: s + TABLE[11 - n], 0.0, TABLE[(11 - SLOT).clamp(min=0)]),
    ],
)
def test_functions_of_the_scores(score_mod, cap, bias):
    out, (query, key, value), matches = run(score_mod, visible())
    assert [type(match) for match in matches] == [Site]
    scores = 0.3 * query @ key.repeat_interleave(3, 1).mT
    scores = cap * torch.tanh(scores / cap) if cap else scores
    weights = (scores + bias).masked_fill(~dense(), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, weights @ value.repeat_interleave(3, 1), rtol=1e-4, atol=1e-4)


def test_a_mask_that_is_the_same_for_all_slots():
    hidden = torch.tensor([False, True])
    block_mask = create_block_mask(lambda b, h, q, n: ~hidden[b], B=2, H=None, Q_LEN=1, KV_LEN=32, device="cpu")
    out, _, matches = run(None, block_mask)
    assert [type(match) for match in matches] == [Site]
    assert (out[1] == 0).all() and (out[0] != 0).all()


@pytest.mark.parametrize("full", [False, True])
def test_blocks_that_are_not_listed_are_hidden(full):
    """Whatever the mask function says; blocks of 8 slots, of which the first and the third are listed."""
    counts, blocks = torch.tensor([[[2]]]), torch.tensor([[[[2, 0, 1, 3]]]])
    listed = (torch.zeros_like(counts), blocks, counts, blocks) if full else (counts, blocks)
    block_mask = BlockMask.from_kv_blocks(*(x.int() for x in listed), BLOCK_SIZE=(128, 8), seq_lengths=(1, 32))
    out, (query, key, value), matches = run(None, block_mask)
    assert [type(match) for match in matches] == [Site]
    weights = 0.3 * query @ key.repeat_interleave(3, 1).mT
    hidden = (SLOT // 8 == 1) | (SLOT >= 12)
    weights = weights.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(out, weights @ value.repeat_interleave(3, 1), rtol=1e-4, atol=1e-4)


def test_a_denominator_that_nobody_uses_does_no_harm():
    """transformers asks for it on a GPU."""

    def attend(query, key, value):
        return flex_attention(
            query, key, value, None, visible_mask, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )[0]

    visible_mask = visible()
    out, _, matches = run(attend=attend)
    assert [type(match) for match in matches] == [Site]
    torch.testing.assert_close(out, run(None, visible_mask)[0])


def doubled(score, *index):
    return 2 * score


def scaled_bias(score, batch, head, query, slot):
    return torch.add(score, BIAS[batch, head, query, slot], alpha=0.1)


def floored(score, *index):
    return 2.0 * torch.tanh(torch.div(score, 2.0, rounding_mode="floor"))


def looked_up_by_row(score, batch, head, query, slot):
    return score + BIAS[batch][head, query, slot]


@pytest.mark.parametrize(
    ("score_mod", "reason"),
    [
        (doubled, "its score_mod does more than to cap scores and to add to them"),
        (scaled_bias, "its score_mod does more than to cap scores and to add to them"),
        (floored, "its score_mod does more than to cap scores and to add to them"),
        (looked_up_by_row, "its functions use getitem, of which it is not known to work element by element"),
    ],
)
def test_other_functions_of_the_scores_are_named(score_mod, reason):
    matches = reasons(lambda q, k, v: flex_attention(q, k, v, score_mod, visible(), scale=0.3, enable_gqa=True))
    assert [reason in match.reason for match in matches] == [True], matches


def test_a_denominator_that_is_used_is_named():
    def attend(query, key, value):
        out, aux = flex_attention(
            query, key, value, None, visible(), scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return out * torch.sigmoid(aux.lse[..., None])

    (match,) = reasons(attend)
    assert "the logarithm of its denominator is used" in match.reason


def reasons(attend):
    """What the pass finds in a graph that is not run: flex attention takes a compiler on a CPU."""
    found = []

    class Found(Exception):
        pass

    def backend(gm, inputs):
        from kvpass.fx_passes.match import find_sites

        found.extend(match for match in find_sites(gm.graph) if not isinstance(match, Exact))
        raise Found

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 1, 64, generator=generator) for heads in (6, 2, 2))
    layer = QuantizedLayer(MIXED.layer(0), 32)
    layer.update(key.repeat(1, 1, 11, 1), value.repeat(1, 1, 11, 1))
    with pytest.raises(Exception):  # noqa: B017  Dynamo wraps it
        torch.compile(lambda q, k, v: attend(q, *layer.update(k, v)), backend=backend)(query, key, value)
    assert all(isinstance(match, Rejected) for match in found)
    return found
