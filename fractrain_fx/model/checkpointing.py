"""Activation checkpointing of a rewritten model: the methods that trainers and libraries call for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fractrain_fx.errors import ConfigError, ModelError, near
from fractrain_fx.model.shown import Shown

__all__ = ["Checkpointed"]

_OPTIONS = ("preserve_rng_state", "determinism_check", "early_stop")


class Checkpointed(Shown):
    """The part of :class:`fractrain_fx.FracModel` that switches activation checkpointing.

    Training then keeps what goes from segment to segment, and computes a segment's activations again in backward.
    Outputs, gradients, buffers and random numbers are the same bit for bit.
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
        for name in options:
            if name not in _OPTIONS:
                known = ("use_reentrant", *_OPTIONS)
                raise ConfigError(f"checkpointing has no option {name!r}: {', '.join(known)}.{near(name, known)}")
        segments = self._state.running[True].segments()
        if not any(each.once is None for each in segments[:-1]):
            reasons = {each.once for each in segments[:-1]} - {None}
            raise ModelError(
                "checkpointing would change nothing: this model runs as one segment, as it has neither residual blocks "
                "nor a module class with several instances that run one after the other"
                if not reasons
                else f"checkpointing would change nothing: {'; '.join(sorted(filter(None, reasons)))}"
            )
        for variant in self._state.variants:  # made now, because a compiled call can make none
            variant.running[True].chained(options, self._state.groups_of)
        self._state.checkpointing = options

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        self._state.checkpointing = None

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
        """The name in timm."""
        self.gradient_checkpointing_enable() if enable else self.gradient_checkpointing_disable()
