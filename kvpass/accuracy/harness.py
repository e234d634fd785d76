"""Generative tasks of lm-evaluation-harness with kvpass enabled (``pip install 'kvpass[lm-eval]'``).

Only generative tasks: a log-likelihood task scores its answers in one forward pass over question and answer, which
reads no cache, so quantization of the cache cannot change its result. Such a task is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from kvpass.accuracy.retrieval import enabled
from kvpass.config import KVQuantConfig
from kvpass.pretrained import require


def run_tasks(
    model: nn.Module,
    tokenizer: Any,
    configs: Mapping[str, KVQuantConfig],
    tasks: Sequence[str],
    limit: int | None = None,
    batch_size: int = 1,
) -> dict[str, dict[str, dict[str, float]]]:
    """Results by configuration (``full`` is the model's own cache), task, and metric with its filter.

    Args:
        model, tokenizer: A Hugging Face causal LM.
        configs: By name.
        tasks: Names of the harness.
        limit: Examples of each task; None for all.
        batch_size: Requests generated at once.

    Raises:
        ValueError: lm-eval is not installed, or a task is not generative.
    """
    require("lm_eval", "lm-eval", "running lm-eval tasks")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    class GenerativeOnly(HFLM):  # type: ignore[misc, unused-ignore]
        def loglikelihood(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            raise ValueError(
                f"{requests[0].task_name} is a log-likelihood task: it reads no KV cache, so its result cannot depend "
                "on how the cache is stored. Use a generative task, such as gsm8k, or kvpass eval without --lm-eval"
            )

        loglikelihood_rolling = loglikelihood

    found = {}
    for name, config in [("full", None), *configs.items()]:
        with enabled(model, config):
            judged = GenerativeOnly(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            results = lm_eval.simple_evaluate(model=judged, tasks=list(tasks), limit=limit)["results"]
        found[name] = {
            task: {metric: value for metric, value in metrics.items() if isinstance(value, (int, float))}
            for task, metrics in results.items()
        }
    return found
