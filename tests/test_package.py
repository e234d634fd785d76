"""What holds for the package as a whole: the direction of imports, an import without side effects, the entry point."""

import ast
import importlib.util
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import kvpass

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvpass"

# A module may import from its own line and from those above it, minus FORBIDDEN. `kvpass` is the package's __init__.
LAYERS = (
    ("formats", "pretrained", "windows"),
    ("checkpoint", "scale_files", "scales", "config", "reference", "tiles"),
    ("kernels",),
    ("ops",),
    ("architecture", "first_tokens"),
    ("layers",),
    ("cache", "encoder_decoder", "static_cache", "fx_passes"),
    ("backend", "calibrate", "devices", "model_report", "used_cache"),
    ("hf", "accuracy", "bench"),
    ("kvpass",),
    ("cli", "__main__"),
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}
# Caches and passes know each other by the names of operators alone.
CACHES = ("layers", "cache", "encoder_decoder", "static_cache")
FORBIDDEN = {
    *[(cache, "fx_passes") for cache in CACHES],
    *[("fx_passes", cache) for cache in CACHES],
    ("kernels", "reference"),
}


class Import(NamedTuple):
    importer: str
    imported: str
    lazy: bool
    place: str


def find_imports(package: Path) -> list[Import]:
    """Every import of one module of ``package`` by another, also those inside functions."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = []
    for importer, path in files.items():
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        lazy = {inner for function in functions for inner in ast.walk(function)}
        parent = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
                # `from package import module` imports the module, `from module import name` the module it names
                inner = [f"{source}.{alias.name}" for alias in node.names]
                names = [name if name in files else source for name in inner]
            else:
                continue
            place = f"{path.relative_to(package.parent)}:{node.lineno}"
            found += [Import(importer, name, node in lazy, place) for name in names if name in files]
    return found


def unit(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    return (module.split(".") + [module])[1]


def violations(imports: list[Import]) -> list[str]:
    wrong = []
    for importer, imported, lazy, place in imports:
        pair = unit(importer), unit(imported)
        if RANK[pair[0]] < RANK[pair[1]] or pair in FORBIDDEN:
            wrong.append(f"{place}: {pair[0]} must not import {pair[1]}")
        if pair[1] == "kernels" != pair[0] and not lazy:
            wrong.append(f"{place}: {pair[0]} may import kernels inside a function only, since they import triton")
    return wrong


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    missing = modules - RANK.keys() - {"__init__"}
    assert not missing, f"{missing}: say in LAYERS what may import them"


def test_imports_go_one_way() -> None:
    imports = find_imports(PACKAGE)
    assert imports
    assert not violations(imports), "\n".join(violations(imports))


def test_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported, *_ in find_imports(PACKAGE):
        graph.setdefault(importer, set()).add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the cycle


def test_kernels_and_reference_meet_in_ops_only() -> None:
    importers = {
        name: {unit(importer) for importer, imported, *_ in find_imports(PACKAGE) if unit(imported) == name}
        for name in ("kernels", "reference")
    }
    assert (importers["kernels"] - {"kernels"}) & importers["reference"] <= {"ops"}


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("formats.py", "from kvpass.ops import store", "formats must not import ops"),
        ("formats.py", "def f():\n    import kvpass.ops", "formats must not import ops"),
        ("cache.py", "from kvpass import fx_passes", "cache must not import fx_passes"),
        ("fx_passes/match.py", "from ..cache import QuantizedCache", "fx_passes must not import cache"),
        ("kernels/store.py", "from .. import reference", "kernels must not import reference"),
        ("kernels/store.py", "from kvpass import ops", "kernels must not import ops"),
        ("hf.py", "from kvpass import enable", "hf must not import kvpass"),
        ("ops.py", "from kvpass.kernels import store", "inside a function only"),
        ("ops.py", "def f():\n    from kvpass.kernels.store import store", None),
        ("hf.py", "from .fx_passes import match\nimport kvpass.cache, torch", None),
        ("fx_passes/match.py", "from .report import Site\nfrom ..ops import store", None),
    ],
)
def test_finds_a_wrong_import(tmp_path: Path, path: str, source: str, expected: str | None) -> None:
    package = tmp_path / "kvpass"
    modules = "formats reference ops cache hf kernels/__init__ kernels/store fx_passes/__init__ fx_passes/match"
    for module in ["__init__", "fx_passes/report", *modules.split()]:
        file = package / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (package / path).write_text(source)
    found = violations(find_imports(package))
    if expected is None:
        assert not found
    else:
        (line,) = found
        assert line.startswith(f"kvpass/{path}:") and expected in line


def run(code: str) -> str:
    """Standard output of ``code`` in a new interpreter."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_needs_no_triton() -> None:
    loaded = "import sys; print([name for name in ('triton', 'flashinfer') if name in sys.modules])"
    assert run(f"import torch, transformers; {loaded}").strip() == "[]", "torch itself imports it: test in another way"
    # torch._dynamo imports triton, and so do transformers' modeling_utils, masking_utils and generation
    assert run(f"import kvpass; {loaded}").strip() == "[]", "import inside a function what imports triton"


def test_import_changes_no_global_state() -> None:
    code = """
import torch, torch._dynamo, torch._inductor.config, torch.nn.functional as F, torch.utils._pytree as pytree
from torch._dynamo.backends import registry
from transformers import Cache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    registry._lazy_import()
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")],
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "backends": (sorted(registry._BACKENDS), sorted(registry._COMPILER_FNS)),
        "pytree": set(pytree.SUPPORTED_NODES),
        "attention": dict(ALL_ATTENTION_FUNCTIONS.items()),
        "masks": dict(ALL_MASK_ATTENTION_FUNCTIONS.items()),
        "sdpa": F.scaled_dot_product_attention,
        "classes": [dict(vars(c)) for c in (torch.Tensor, torch.nn.Module, Cache, StaticCache, GenerationMixin)],
        "model": {name: value for name, value in vars(PreTrainedModel).items()},
    }

before = state()
import kvpass
after = state()
print([name for name in before if before[name] != after[name]])
"""
    assert run(code).strip() == "[]"


def test_backend_is_known_without_import() -> None:
    code = """
import sys, torch._dynamo
print("kvquant" in torch._dynamo.list_backends(exclude_tags=()), "kvpass" in sys.modules)
"""
    assert run(code).split() == ["True", "False"], "is kvpass installed? pip install -e '.[test]'"


def test_version() -> None:
    assert kvpass.__version__ == version("kvpass")


@pytest.mark.parametrize(
    "name",
    "enable disable report QuantizedCache KVQuantConfig KVScales calibrate evaluate Evaluation Retrieval tune Tuning "
    "KVFormat register_format get_format format_names".split(),
)
def test_public_name(name: str) -> None:
    assert name in kvpass.__all__ and hasattr(kvpass, name)
