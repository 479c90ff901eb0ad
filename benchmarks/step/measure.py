"""Time and memory of steps: interleaved rounds, what autograd keeps, peaks and waiting on a GPU."""

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

# What the CPU does when it waits for a GPU, as the profiler names it.
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


def seconds(work: Callable[[], None], device: str) -> float:
    """Wall time of one call, with what it left running on a GPU."""
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def processor_seconds(work: Callable[[], None], device: str) -> float:
    """Processor time of one call, all threads: on a busy machine, with one thread, what wall time would have been."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    device: str,
    *,
    seed: int = 0,
    clock: Callable[[Callable[[], None], str], float] = seconds,
) -> dict[str, list[float]]:
    """Seconds of each step, once a round, the rounds in an order of their own, so that a slow spell hits all alike."""
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

    Each storage that a saved tensor lies in counts once and whole, parameters not at all (they are there anyway).
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
    """The most that a step had allocated on the GPU at a time, above what was there before."""
    _finish("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    _finish("cuda")
    return torch.cuda.max_memory_allocated() - before


def waits(step: Step) -> dict[str, int]:
    """How often a step waits for the GPU, by kind, as the profiler sees it; empty where it never does."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("measured step"):
            step.run()
        _finish("cuda")
    events = [(event.name, event.time_range.start, event.time_range.end) for event in profile.events() or ()]
    return waits_among(events, "measured step")


def waits_among(events: Iterable[tuple[str, float, float]], inside: str) -> dict[str, int]:
    """Among events (name, start, end) those that wait and began while the one called ``inside`` lasted."""
    events = list(events)
    spans: Sequence[tuple[float, float]] = [(start, end) for name, start, end in events if name == inside]
    found: dict[str, int] = {}
    for name, start, _ in events:
        kind = next((wait for wait in _WAITS if name.startswith(wait)), None)
        if kind and any(first <= start <= last for first, last in spans):
            found[kind] = found.get(kind, 0) + 1
    return found


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
