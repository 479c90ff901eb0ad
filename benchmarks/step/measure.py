"""Time and memory of steps: interleaved rounds, bytes that autograd keeps, peaks and waits on a GPU."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.step.methods import Step

__all__ = ["interleaved", "peak_bytes", "processor_seconds", "saved_bytes", "seconds", "waits", "waits_among"]

# The profiler's names of calls in which the CPU waits for a GPU.
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of one call, until the GPU has finished."""
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def processor_seconds(work: Callable[[], object], device: str) -> float:
    """Processor time of one call, all threads. With one thread it is the wall time of an idle machine."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str,
    *,
    seed: int = 0,
    clock: Callable[[Callable[[], object], str], float] = seconds,
) -> dict[str, list[float]]:
    """Seconds of each step, once in each round in random order, so that slow periods affect all equally."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, chance = list(steps), random.Random(seed)
    for _ in range(rounds):
        chance.shuffle(order)
        gc.collect()
        gc.disable()
        try:
            for name in order:
                times[name].append(clock(steps[name], device))
        finally:
            gc.enable()
    return times


def saved_bytes(step: Step) -> int:
    """Bytes that autograd keeps between the forward and the backward pass of a step.

    Each storage of a saved tensor counts once and as a whole. Parameters do not count, because they exist anyway.
    """
    storages: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in step.parameters}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return saved

    with step.mode():
        with saved_tensors_hooks(pack, lambda saved: saved):
            loss = step.forward()
        loss.backward()
    step.zero_grad()
    return sum(storages.values())


def peak_bytes(step: Step) -> int:
    """The most bytes that a step allocates on the GPU at a time, without memory allocated before."""
    _finish("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    _finish("cuda")
    return torch.cuda.max_memory_allocated() - before


def waits(step: Step) -> dict[str, int]:
    """The number of waits of a step for the GPU, by kind, from the profiler; empty if there are none."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("measured step"):
            step.run()
        _finish("cuda")
    events = [(event.name, event.time_range.start, event.time_range.end) for event in profile.events() or ()]
    return waits_among(events, "measured step")


def waits_among(events: Iterable[tuple[str, float, float]], inside: str) -> dict[str, int]:
    """The waits among events (name, start, end) that begin during the event ``inside``."""
    events = list(events)
    spans: Sequence[tuple[float, float]] = [(start, end) for name, start, end in events if name == inside]
    counts: dict[str, int] = {}
    for name, start, _ in events:
        kind = next((wait for wait in _WAITS if name.startswith(wait)), None)
        if kind and any(first <= start <= last for first, last in spans):
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
