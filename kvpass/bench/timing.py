"""How a call is timed: CUDA-graph replay, several variants in turn, median and spread.

A graph holds several calls, which rotate over copies of their buffers that together exceed the L2 cache four times, so
that each call reads from memory. All variants of a case are replayed in turn, round after round, and therefore share
whatever the machine does meanwhile. On CPU calls are timed with the wall clock, once a round: that is for tests.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CACHE_MULTIPLE = 4
MIN_CALLS, MAX_CALLS = 3, 256
TARGET_MS = 4.0  # of one replay, for calls that are short
CEILING_BYTES = {"cuda": 2 << 30, "cpu": 1 << 20}

Call = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Summary:
    """Milliseconds of one call over the rounds."""

    median: float
    p10: float
    p90: float


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie, interpolated between neighbours."""
    if not values:
        raise ValueError("no values to summarize")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Summary:
    return Summary(*(quantile(values, share) for share in (0.5, 0.1, 0.9)))


def copies_for(nbytes: int, device: torch.device) -> int:
    """Copies of a variant's buffers, so that a rotation over them misses the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(CACHE_MULTIPLE * cache / nbytes))


@dataclass(frozen=True)
class Replay:
    """Something that can be timed.

    Attributes:
        run: Does ``calls`` calls.
        calls: How many that is.
        output: What the last of them writes; on CUDA, valid after ``run``.
        call: What is called. It keeps the buffers alive, whose addresses are all that a graph knows.
    """

    run: Callable[[], None]
    calls: int
    output: torch.Tensor
    call: Call


def prepare(call: Call, copies: int, device: torch.device) -> Replay:
    """Warm ``call`` up (it is given the index of a copy) and, on CUDA, capture a graph of several calls."""
    if device.type != "cuda":

        def run() -> None:
            call(0)

        return Replay(run, 1, call(0), call)
    call(0)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call(copies - 1)
    torch.cuda.synchronize(device)
    wanted = TARGET_MS / (1e3 * (time.perf_counter() - begin))
    rotations = math.ceil(min(max(wanted, MIN_CALLS), MAX_CALLS) / copies)
    calls = copies * max(1, rotations)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            output = call(index % copies)
    return Replay(graph.replay, calls, output, call)


def interleave(replays: dict[str, Replay], rounds: int, device: torch.device) -> dict[str, Summary]:
    """Time all ``replays`` in turn, each round beginning with another one; milliseconds of one call."""
    names = list(replays)
    if not names:
        return {}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        replays[name].run()
    for number in range(rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name, elapsed in zip(order, _one_round([replays[name] for name in order], device), strict=True):
            samples[name].append(elapsed / replays[name].calls)
    return {name: summarize(values) for name, values in samples.items()}


def _one_round(replays: list[Replay], device: torch.device) -> list[float]:
    """Milliseconds of each replay."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for replay in replays:
            replay.run()
            marks.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(replays) + 1)]
    events[0].record()
    for replay, event in zip(replays, events[1:], strict=True):
        replay.run()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False)]


@dataclass(frozen=True)
class Ceiling:
    """A plain memory operation that others are measured against.

    Attributes:
        name: What it is called in tables.
        replay: The operation.
        nbytes: Bytes that one call moves.
    """

    name: str
    replay: Replay
    nbytes: int


def read_ceiling(device: torch.device) -> Ceiling:
    """The fastest of several plain kernels that read memory once and keep one sum per program."""
    nbytes = CEILING_BYTES[device.type]
    source = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=device)
    candidates: dict[str, Call] = {"torch.sum": lambda _: source.sum()}
    if device.type == "cuda":
        from kvpass.bench import read_kernel

        for config in read_kernel.CONFIGURATIONS:
            candidates[str(config)] = functools.partial(_ignoring_copy, read_kernel.read, source, config)
    replays = {name: prepare(call, 1, device) for name, call in candidates.items()}
    times = interleave(replays, 5, device)
    best = min(times, key=lambda name: times[name].median)
    return Ceiling("read ceiling", replays[best], nbytes)


def _ignoring_copy(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    """``function`` of all ``arguments`` but the last, the index of the copy."""
    return function(*arguments[:-1])


def copy_ceiling(device: torch.device) -> Ceiling:
    """A copy inside device memory; bytes read plus bytes written."""
    half = CEILING_BYTES[device.type] // 2
    source = torch.randint(0, 256, (half,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Ceiling("copy", prepare(lambda _: target.copy_(source), 1, device), 2 * half)


def free_memory(device: torch.device) -> None:
    """Give back what a finished case held, its graphs' memory included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
