"""``torch.compile(model, backend="kvquant")``: run the passes, hand the graph to Inductor."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from kvpass import ops  # registers the operators that graphs refer to
from kvpass.config import KVQuantConfig
from kvpass.formats import KVBuffers, unknown_name
from kvpass.fx_passes.match import STORE, Site, find_sites
from kvpass.fx_passes.report import GraphReport, describe
from kvpass.fx_passes.rewrite import Input, StaticPair, rewrite
from kvpass.fx_passes.stack import Stacked, find_stacks, stack_linears
from kvpass.static_cache import ReleasedBuffer, quantize_pair

Compiled = Callable[..., Any]


class NotFusedError(RuntimeError):
    """With ``strict=True``: a compiled graph reads K and V in a way that could not be fused."""


class NothingToFuseWarning(UserWarning):
    """A graph was compiled with ``kvquant`` in which no attention was found."""


def kvquant(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a Dynamo graph, with every attention over a KV cache fused with the cache's decoding.

    Args:
        gm, example_inputs: What Dynamo hands to a backend.
        mode: A mode of ``torch.compile``; ``reduce-overhead`` records CUDA graphs.
        options: Fields of :class:`kvpass.KVQuantConfig` (formats and scales apply to a transformers ``StaticCache``;
            a :class:`kvpass.QuantizedCache` brings its own), ``mode``, and options of Inductor.

    A graph that writes or reads a quantized cache is an inference graph: what it returns carries no gradient.

    Raises:
        ValueError: An unknown option or value.
        NotFusedError: With ``strict``, an attention that reads a cache was not fused; the message says which and why.
    """
    config, mode, patches = _parse(mode, options)
    _detach_graph(gm)
    matches = find_sites(gm.graph, config)
    sites = [match for match in matches if isinstance(match, Site)]
    uses_cache = any(str(node.target).startswith("kvpass.") for node in gm.graph.nodes) or bool(sites)
    stacks = find_stacks(gm.graph, example_inputs) if uses_cache and config.stack_linears else []
    devices = tuple(sorted({str(x.device) for x in example_inputs if isinstance(x, Tensor) and x.is_cuda}))
    report = describe(matches, config, stacks, devices)
    _remember(report, example_inputs)
    _complain(report, config.strict)

    born = _buffers_born(gm.graph)
    origin, pairs = rewrite(gm, sites, config)
    stack_linears(gm.graph, stacks, origin)
    gm.graph.lint()
    gm.recompile()
    inputs = [origin[node] for node in gm.graph.find_nodes(op="placeholder")]
    if uses_cache and torch.is_grad_enabled():
        _disable_gradients(gm)
    first_use = any(not isinstance(example_inputs[pair.key], ReleasedBuffer) for pair in pairs)
    if first_use or born or len(devices) > 1:
        # A graph that runs once per cache: recording a CUDA graph would be wasted, and would own the cache's memory.
        # And torch records CUDA graphs of one device.
        patches["triton.cudagraphs"] = False
    with torch.no_grad() if uses_cache else nullcontext():
        compiled = _inductor(gm, _example_inputs(inputs, pairs, example_inputs), mode, patches)
    if not uses_cache:
        return compiled

    is_unchanged = all(isinstance(source, Input) and source.field is None for source in inputs)

    @torch.no_grad()
    def run(*args: Any) -> Any:
        for pair in pairs:
            quantize_pair(args[pair.key], args[pair.value], pair.layer)
        outputs = compiled(*(args if is_unchanged else [source.of(args) for source in inputs]))
        for index in born:
            torch._dynamo.mark_static_address(outputs[index])
        # torch 2.11 marks some as in need of gradients, although nothing recorded how they came about
        return [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in outputs]

    return run


# Where set, graphs that are compiled in this context are reported here, and nowhere else.
collected: ContextVar[deque[GraphReport]] = ContextVar("collected")
_reports: deque[tuple[list[weakref.ref[Tensor]], GraphReport]] = deque(maxlen=256)


def reports_for(parameters: Sequence[Tensor]) -> list[GraphReport]:
    """Reports of the graphs compiled so far that use any of ``parameters``, oldest first, but for :data:`collected`."""
    wanted = {id(parameter) for parameter in parameters}
    return [report for refs, report in _reports if any(id(p) in wanted for ref in refs if (p := ref()) is not None)]


def forget_reports(parameters: Sequence[Tensor]) -> None:
    """Drop the reports that :func:`reports_for` would return."""
    gone = {id(report) for report in reports_for(parameters)}
    kept = [entry for entry in _reports if id(entry[1]) not in gone]
    _reports.clear()
    _reports.extend(kept)


def _remember(report: GraphReport, example_inputs: Sequence[Any]) -> None:
    if (reports := collected.get(None)) is not None:
        reports.append(report)
        return
    parameters = [x for x in example_inputs if isinstance(x, torch.nn.Parameter)]
    _reports.append(([weakref.ref(p) for p in parameters], report))


def _complain(report: GraphReport, strict: bool) -> None:
    if not report.sites:
        warnings.warn(
            f"kvquant found nothing to fuse in a graph: {report.why_none}", NothingToFuseWarning, stacklevel=3
        )
    elif report.count("not fused"):
        message = f"kvquant left attention unfused (it is computed correctly, and slowly)\n{report}"
        if strict:
            raise NotFusedError(message)
        warnings.warn(message, stacklevel=3)


def _parse(mode: str | None, options: Mapping[str, Any] | None) -> tuple[KVQuantConfig, str | None, dict[str, Any]]:
    options = dict(options or {})
    mode = options.pop("mode", mode)
    known = [field.name for field in fields(KVQuantConfig)]
    config = KVQuantConfig.from_dict({key: options.pop(key) for key in known if key in options})
    inductor = torch._inductor.list_options()
    for key in options:
        if key not in inductor:
            raise ValueError(unknown_name("option", key, [*known, "mode"]) + " Inductor's own options are taken too.")
    modes = list(torch._inductor.list_mode_options())
    if mode not in (None, *modes):
        raise ValueError(unknown_name("mode", mode, modes))
    return config, mode, options


def _detach_graph(gm: fx.GraphModule) -> None:
    """Give ``gm`` a copy of its graph: Dynamo still reads the placeholders of the one it made."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(gm.graph, copies)
    graph.output(outputs)
    for node in gm.graph.find_nodes(op="placeholder"):
        copies[node]._dynamo_source = node._dynamo_source
    gm.graph = graph


def _disable_gradients(gm: fx.GraphModule) -> None:
    """Have ``gm`` run without gradients. Compiling it under ``no_grad`` is not enough: torch 2.11 traces it in the mode
    that Dynamo found."""
    nodes = list(gm.graph.nodes)
    for enabled, place in ((False, next(n for n in nodes if n.op != "placeholder")), (True, nodes[-1])):
        with gm.graph.inserting_before(place):
            gm.graph.call_function(torch._C._set_grad_enabled, (enabled,))
    gm.recompile()


def _inductor(gm: fx.GraphModule, inputs: Sequence[Any], mode: str | None, patches: dict[str, Any]) -> Compiled:
    from torch._inductor.compile_fx import compile_fx

    mode_options = torch._inductor.list_mode_options(mode) if mode else {}
    return compile_fx(gm, list(inputs), config_patches=mode_options | patches)  # type: ignore[return-value]


def _example_inputs(inputs: Sequence[Input | Stacked], pairs: Sequence[StaticPair], before: Sequence[Any]) -> list[Any]:
    """The example inputs of the rewritten graph. A ``StaticCache`` is quantized, and weights are moved, when the graph
    runs, not when it is compiled (Dynamo's guards must see them as they were), so the new inputs are fake tensors."""
    fake_mode = detect_fake_mode(before)
    buffers: dict[int, KVBuffers] = {}
    with fake_mode or nullcontext():
        for pair in pairs:
            pair.layer.check(before[pair.key], before[pair.value])
            unset = pair.layer._replace(key_scale=None, value_scale=None, key_centre=None, value_centre=None)
            buffers[pair.key], buffers[pair.value] = unset.allocate_like(before[pair.key], before[pair.value])
        return [
            source.example(before)
            if isinstance(source, Stacked)
            else before[source.position]
            if source.field is None
            else getattr(buffers[source.position], source.field)
            for source in inputs
        ]


def _buffers_born(graph: fx.Graph) -> list[int]:
    """Which outputs are cache buffers that the graph allocates itself, as a ``QuantizedCache``'s first call does: what
    it stores into, and the counter from which the positions are computed."""
    stores = graph.find_nodes(op="call_function", target=STORE)
    kept = {buffer for node in stores for buffer in node.args[3 : 3 + 2 * len(KVBuffers._fields)]}
    pending = [node.args[2] for node in stores]
    while pending:
        node = pending.pop()
        if node not in kept:
            kept.add(node)
            pending += node.all_input_nodes
    (outputs,) = next(iter(graph.find_nodes(op="output"))).args
    return [i for i, out in enumerate(outputs) if isinstance(out, fx.Node) and out in kept and out.op != "placeholder"]


__all__ = ["NotFusedError", "NothingToFuseWarning", "collected", "forget_reports", "kvquant", "ops", "reports_for"]
