"""``docs/compatibility.md``: what the tests of architectures and of ways of generating found, as tables.

Each of those tests compares its own cells with the file. ``pytest --write-compatibility -n 0`` with both files of tests
writes it anew.
"""

from __future__ import annotations

from pathlib import Path

import transformers

TABLE = Path(__file__).parents[1] / "docs" / "compatibility.md"
Rows = dict[str, dict[str, str]]

HEAD = """# Compatibility

Written by the tests with transformers {version}, with which they also hold it up to date:

    pytest -n 0 --write-compatibility tests/test_compatibility.py tests/test_generate_ways.py
"""
SECTIONS = {
    "Architectures": (
        ("layers", "formats", "attention in decode"),
        """Tiny models with random weights, two layers, `attn_implementation` as transformers chooses it, unless the
name says otherwise. For each: logits with the `bf16` format, token by token and in `generate`, equal those with
transformers' own cache, K and V rounded to bf16; logits of the fused graph in the formats of the row, which take
turns (presets; or K/V), equal those of the unfused path on the same bytes. Batch 3 with left padding, past the end
of the sliding window and of its ring, in buffers that hold NaN wherever nothing was written. "Fused" counts the
attentions of one decode step.
""",
    ),
    "Ways of generating": (
        ("full attention", "sliding and full", "linear and full", "encoder-decoder"),
        """Llama, Gemma 3, Qwen3-Next and T5, `fp8_e4m3`. Tokens are those of the unfused path through the same cache,
in every cell that is not refused. "Fused": no step after the prompt read a cache outside the compiled graph.
""",
    ),
}


def is_of_this_version() -> bool:
    """Whether the file was written with the transformers that is installed: others have other models."""
    return f" {transformers.__version__}," in TABLE.read_text()


def read() -> dict[str, Rows]:
    """The tables of the file, by section and first column."""
    found: dict[str, Rows] = {}
    rows: Rows = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line[3:], {})
            header = None
        elif line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            if header is None:
                header = cells
            elif set(name) != {"-"}:
                rows[name] = dict(zip(header, cells, strict=True))
    return found


def write(found: dict[str, Rows]) -> None:
    """Write the file from what tests recorded. Rows of which nothing was recorded stay as they are."""
    before = read() if TABLE.exists() else {}
    lines = [HEAD.format(version=transformers.__version__)]
    for section, (columns, text) in SECTIONS.items():
        lines += [f"## {section}", "", text, f"| | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
        for name, cells in (before.get(section, {}) | found.get(section, {})).items():
            lines.append(f"| {name} | {' | '.join(cells[column] for column in columns)} |")
        lines.append("")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines))
