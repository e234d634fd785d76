"""kvpass: a ``torch.compile`` backend that keeps the KV cache of Hugging Face models in FP8 or FP4.

    import kvpass
    kvpass.enable(model, "nvfp4")
    model.generate(**inputs, max_new_tokens=256)
    print(kvpass.report(model))

Importing kvpass changes nothing and needs no GPU; what a name needs is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpass.accuracy import Evaluation as Evaluation
    from kvpass.accuracy import Retrieval as Retrieval
    from kvpass.accuracy import Tuning as Tuning
    from kvpass.accuracy import evaluate as evaluate
    from kvpass.accuracy import tune as tune
    from kvpass.backend import NotFusedError as NotFusedError
    from kvpass.backend import NothingToFuseWarning as NothingToFuseWarning
    from kvpass.cache import QuantizedCache as QuantizedCache
    from kvpass.calibrate import calibrate as calibrate
    from kvpass.config import KVQuantConfig as KVQuantConfig
    from kvpass.encoder_decoder import QuantizedEncoderDecoderCache as QuantizedEncoderDecoderCache
    from kvpass.formats import KVFormat as KVFormat
    from kvpass.formats import format_names as format_names
    from kvpass.formats import get_format as get_format
    from kvpass.formats import register_format as register_format
    from kvpass.hf import disable as disable
    from kvpass.hf import enable as enable
    from kvpass.hf import report as report
    from kvpass.scales import KVScales as KVScales

_MODULES = {
    "kvpass.accuracy": ("Evaluation", "Retrieval", "Tuning", "evaluate", "tune"),
    "kvpass.backend": ("NotFusedError", "NothingToFuseWarning"),
    "kvpass.cache": ("QuantizedCache",),
    "kvpass.calibrate": ("calibrate",),
    "kvpass.config": ("KVQuantConfig",),
    "kvpass.encoder_decoder": ("QuantizedEncoderDecoderCache",),
    "kvpass.formats": ("KVFormat", "format_names", "get_format", "register_format"),
    "kvpass.hf": ("disable", "enable", "report"),
    "kvpass.scales": ("KVScales",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvpass' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
