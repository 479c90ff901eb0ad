"""A rewritten model segment by segment: activation checkpointing, by the names that trainers call, and compilation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fractrain_fx.capture.source import warn
from fractrain_fx.capture.state import preserved_random_state
from fractrain_fx.errors import ConfigError, ModelError, require_known
from fractrain_fx.model.properties import Properties
from fractrain_fx.model.watcher import counts_step
from fractrain_fx.nn.bits import set_stage, stage_of

__all__ = ["BySegment"]

_OPTIONS = ("preserve_rng_state", "determinism_check", "early_stop")


class BySegment(Properties):
    """The part of :class:`fractrain_fx.FracModel` that switches activation checkpointing and compilation by segment.

    Under checkpointing, training keeps what goes from segment to segment, and computes a segment's activations again in
    backward. Outputs, gradients, buffers and random numbers are the same bit for bit.
    """

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether training computes activations again in backward."""
        return self._state.checkpointing is not None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Keep fewer activations in training: backward computes those of one segment at a time again.

        Args:
            gradient_checkpointing_kwargs: ``preserve_rng_state``, ``determinism_check`` and ``early_stop`` of
                ``torch.utils.checkpoint.checkpoint``; ``use_reentrant`` may only be false.

        Raises:
            ConfigError: an option is unknown or cannot be had.
            ModelError: the model has no part that could run again.
        """
        options = dict(gradient_checkpointing_kwargs or {})
        if options.pop("use_reentrant", False):
            raise ConfigError(
                "use_reentrant=True is not possible: a re-entrant checkpoint loses the gradients of gates and of "
                "values that are not tensors; write gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        require_known("checkpointing", options, ("use_reentrant", *_OPTIONS))
        segments = self._state.running[True].segments()
        if not any(segment.once is None for segment in segments[:-1]):
            reasons = {segment.once for segment in segments[:-1]} - {None}
            raise ModelError(
                "checkpointing would change nothing: this model runs as one segment, as it has neither residual blocks "
                "nor a module class with several instances that run one after the other"
                if not reasons
                else f"checkpointing would change nothing: {'; '.join(sorted(filter(None, reasons)))}"
            )
        self._state.checkpointing = options
        self._make_chains()

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        self._state.checkpointing = None

    def checkpoint_as_before(self) -> None:
        """Switch checkpointing on if the original had it on when it was recorded; warns if that is not possible."""
        if not self._state.recording.python.checkpointed:
            return
        try:
            self.gradient_checkpointing_enable()
        except ModelError as error:
            warn(f"{type(self._state.original).__name__} was set to checkpoint activations, and they are kept: {error}")

    # Before each call of a module that torch.compile made from this one, torch calls ``_infer_parameters`` outside of
    # compiled code if the module has this attribute, as modules with lazy parameters do.
    _initialize_hook = True

    def _infer_parameters(self, module: Any, args: Any, kwargs: Any = None) -> None:
        """Compare, set the engine's precision, and choose or make the recording: compiled code can do none of it."""
        if torch._guards.TracingContext.try_get() is None and not torch.compiler.is_compiling():
            state = self._state
            state.prepare(self.training)
            state.variants.choose(tuple(args), dict(kwargs or {}), self.training)
            if counts_step(state.watcher, self.training):
                state.watcher.before_compiled()

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile calls of this model, as ``nn.Module.compile`` does."""
        super().compile(*args, **options)
        compiled: Any = self._compiled_call_impl

        def call(*inputs: Any, **named: Any) -> Any:
            self._infer_parameters(self, inputs, named)
            return compiled(*inputs, **named)

        self._compiled_call_impl = call

    def compile_segments(self, **options: Any) -> None:
        """Compile each segment when it first runs, instead of the whole model: the first step then takes less time.

        Segments that only differ in their tensors are compiled once. What lies between segments stays in eager mode:
        recordings for other sizes, checks, and checkpointing. Call it instead of ``torch.compile(model)``.

        Args:
            options: of ``torch.compile``: ``fullgraph``, ``dynamic``, ``backend``, ``mode``, ``options``, ``disable``.

        Raises:
            ConfigError: ``torch.compile`` has no such option.
        """
        require_known("torch.compile", options, list(inspect.signature(torch.compile).parameters)[1:])
        self._state.compiler = options
        self._make_chains()

    def compile_stages(self, *args: Any, run: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Compile a training step for the precision of each stage now, so that no turning point has to wait for it.

        Only kernels of torchao depend on the precision; any other model is compiled once for all stages. Parameters,
        gradients, buffers, the stage and random numbers stay as they are.

        Args:
            *args: arguments of a call, with the sizes that training will have.
            **kwargs: the same by keyword.
            run: the result of ``torch.compile(model)``; by default the model itself, after :meth:`compile` or
                :meth:`compile_segments`.

        Raises:
            ConfigError: nothing compiles the model, or it is not in training mode.
        """
        state, config = self._state, self.frac_config
        if run is None and self._compiled_call_impl is None and state.compiler is None:
            raise ConfigError("compile_stages() runs what compiles the model: call model.compile() before it")
        if not self.training:
            raise ConfigError("compile_stages() compiles training steps: call model.train() before it")
        call, now = self if run is None else run, stage_of(self)
        stages = dict.fromkeys(config.precision_stages) if config.run.torchao else {now: None}
        held = [(x, x.detach().clone()) for x in self.buffers()]
        gradients = [(parameter, parameter.grad) for parameter in self.parameters()]
        saved = state.last, state.to_count, state.waits, state.runs
        try:
            with preserved_random_state():
                for stage in stages:
                    if stage is not None:
                        set_stage(self, stage)
                    tensors = [x for x in tree_leaves(call(*args, **kwargs)) if isinstance(x, Tensor)]
                    torch.autograd.backward([x.sum() for x in tensors if x.requires_grad])
                    for parameter, _ in gradients:
                        parameter.grad = None
        finally:
            state.last, state.to_count, state.waits, state.runs = saved
            for x, before in held:
                x.copy_(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if now is not None:
                set_stage(self, now)

    def _make_chains(self) -> None:
        """Make the chain of segments for training now, because a call that torch compiles can make none."""
        for variant in self._state.variants:
            variant.running[True].chained(self._state.wrapping(gradients=True))

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """The name in transformers 5 for :meth:`gradient_checkpointing_enable`.

        Raises:
            ConfigError: ``every_n_layers`` or ``offload`` is set, which segments do not have.
        """
        if every_n_layers != 1 or offload:
            raise ConfigError(
                f"every_n_layers={every_n_layers} and offload={offload} are not possible: a rewritten model is "
                "checkpointed by segments, all on their device. Leave both out"
            )
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs)

    def activation_checkpointing_disable(self) -> None:
        """The name in transformers 5 for :meth:`gradient_checkpointing_disable`."""
        self.gradient_checkpointing_disable()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """The name in timm for :meth:`gradient_checkpointing_enable`, and with ``False`` for its opposite."""
        self.gradient_checkpointing_enable() if enable else self.gradient_checkpointing_disable()
