"""Architectures of transformers, tiny and random: right with a quantized cache, fused or with a reason why not.

For each: what it computes with the bf16 format equals transformers' own cache with K and V rounded to bf16; what it
computes fused equals the unfused path on the same bytes. Batch 3 with left padding, past the end of the sliding window
and of its ring, in buffers that hold NaN wherever nothing was written.

``docs/compatibility.md`` holds the results.
"""

import itertools

import compatibility_table
import pytest
import transformers
from architectures import DECODERS, ENCODER_DECODERS
from trial import FORMATS, try_architecture

from kvpass import layers
from kvpass.layers import QuantizedLayer

# A K or V of a later layer that rounds the other way to bf16, or a router whose near-tie falls the other way.
ROUNDING = 5e-3
# The same where a prompt of one token (of an encoder-decoder) is read as it was stored. A position off by one is ten
# times that.
GENERATED = 5e-2
# Two orders of fp32 arithmetic.
ARITHMETIC = 1e-3


@pytest.fixture(autouse=True)
def short_rings_of_poison(monkeypatch):
    allocate = QuantizedLayer.lazy_initialization

    def poisoned(self, *args):
        allocate(self, *args)
        for buffers in (self.key, self.value):
            buffers.codes.fill_(float("nan") if buffers.codes.is_floating_point() else 0xFF)
            if buffers.block_scale is not None:
                buffers.block_scale.fill_(0xFF)
            if buffers.kept is not None:
                buffers.kept.fill_(float("nan"))

    monkeypatch.setattr(QuantizedLayer, "lazy_initialization", poisoned)
    monkeypatch.setattr(layers, "SPARE_SLOTS", 4)


ARCHITECTURES = [*DECODERS, *ENCODER_DECODERS]
IN_TURNS = list(zip(ARCHITECTURES, itertools.cycle(FORMATS)))


@pytest.mark.parametrize("architecture, formats", IN_TURNS, ids=[a.name for a in ARCHITECTURES])
def test_architecture(architecture, formats, compatibility):
    if not hasattr(transformers, architecture.config):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.config}")
    result = try_architecture(architecture, FORMATS[formats])
    if result.refused is None:
        assert result.error < ROUNDING
        assert result.generate_error < GENERATED
        assert result.fusion_error < ARITHMETIC
        assert result.fused or result.reasons
    verdict = [f"{result.fused} fused"] if result.fused else []
    verdict += [f"right, not fused: {reason}" for reason in result.reasons]
    cell = "; ".join(verdict) if result.refused is None else f"refused: {result.refused}"
    formats = formats if result.refused is None else ""
    cells = {"layers": ", ".join(result.kinds), "formats": formats, "attention in decode": cell}
    compatibility("Architectures", architecture.name, **cells)


def test_there_are_enough_and_no_others_in_the_table(request):
    names = [a.name for a in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 60
    if not request.config.getoption("--write-compatibility"):
        assert set(compatibility_table.read()["Architectures"]) == set(names)
