"""Make a rewritten model look to transformers' Trainer like the original: its class and its signature.

Trainer derives labels, accepted columns and saving from the class of a model, so it gets an instance of a new subclass
of the original's class, which has the parameters of the rewritten model and runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from fractrain_fx.errors import RunError
from fractrain_fx.model import FracModel
from fractrain_fx.model.saved.folder import save
from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = ["Labels", "face_of", "frac_model_of", "labels_of"]

# What the original's class does not have, taken from the rewritten model: ``trainer.model.ops``.
_SHOWN = ("ops", "blocks", "macs", "cost", "stage", "targets", "frac_config", "kernels", "param_groups", "restore")
_SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
# Whether this version of transformers leaves out the first token of a causal model when it counts labels.
_SHIFTS = "_loss_shifts_labels" in Trainer.__init__.__code__.co_names


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that calls the method of that name of the rewritten model."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__dict__["_frac_model"], name)(*args, **kwargs)

    return method


class _Face:
    """The methods that come before those of the original's class. The rewritten model is ``_frac_model``."""

    # forward scales the loss by num_items_in_batch, whatever the original does.
    accepts_loss_kwargs = True

    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Run the rewritten graph. With ``num_items_in_batch`` the loss is this batch's share of the step's loss.

        Trainer needs the sum over the labels divided by the number of labels of the whole optimizer step; the recorded
        graph gives the mean.
        """
        model: FracModel = self.__dict__["_frac_model"]
        output = model(*args, **kwargs)
        loss = _loss_of(output)
        if loss is None:
            return output
        labels = labels_of(model._state.original, kwargs, num_items_in_batch)
        mean = scaled = loss
        if labels is not None:
            mean = torch.where(labels.number > 0, loss, 0)  # the mean over no labels is NaN, and NaN times 0 is too
            scaled = mean * labels.share
        if model.training and self.__dict__["_add_cost"] is not None:
            scaled = self.__dict__["_add_cost"](scaled, mean, labels)
        return output if scaled is loss else _with_loss(output, scaled)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in _SHOWN or "_frac_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_frac_model"], name)

    def train(self, mode: bool = True) -> Self:
        self.__dict__["_frac_model"].train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.__dict__["_frac_model"]._apply(fn, recurse)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a checkpoint of Trainer, in which safetensors keeps tied parameters once.

        The optimizer of a model that was not rewritten has no gates, so its checkpoint is refused.
        """
        model: FracModel = self.__dict__["_frac_model"]
        if not any(name.startswith(f"{NAMESPACE}.") for name in state_dict) and NAMESPACE in model._modules:
            raise RunError(
                "the checkpoint is of a model that was not rewritten, so it holds no state of FracTrain: load its "
                "weights with model.load_state_dict(...) and start anew"
            )
        tensors = {tensor.data_ptr(): state_dict[name] for name, tensor in _stored(model).items() if name in state_dict}
        tied = {name: tensors[t.data_ptr()] for name, t in _stored(model).items() if t.data_ptr() in tensors}
        return model.load_state_dict({**tied, **state_dict}, strict=strict, assign=assign)

    def save_pretrained(self, save_directory: Any, *, is_main_process: bool = True, **_: Any) -> None:
        """Call ``FracModel.save_pretrained`` on the process that writes."""
        model: FracModel = self.__dict__["_frac_model"]
        if is_main_process:  # Trainer reads a checkpoint's tensors from one file
            folder = Path(save_directory)
            save(model, folder, folder.name, together=folder.name.startswith(PREFIX_CHECKPOINT_DIR))

    # With the original class and the present weights in float, and a warning.
    generate = _forwarded("generate")
    activation_checkpointing_enable = _forwarded("activation_checkpointing_enable")
    activation_checkpointing_disable = _forwarded("activation_checkpointing_disable")
    gradient_checkpointing_disable = _forwarded("gradient_checkpointing_disable")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        """The older name of ``activation_checkpointing_enable``."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether the rewritten model computes activations again in backward."""
        return bool(self.__dict__["_frac_model"].is_gradient_checkpointing)

    is_gradient_checkpointing = is_activation_checkpointing


def face_of(model: FracModel, add_cost: Callable[[Tensor, Tensor, Labels | None], Tensor] | None = None) -> nn.Module:
    """The model to pass to ``Trainer``; it has the parameters, names and checkpoints of ``model``.

    ``add_cost`` is called in training with the loss, the batch's mean loss and, if the loss already is the batch's
    share of the step's loss, the batch's labels; it returns the loss with the cost term.
    """
    original = model._state.original
    kind = type(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _Face.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    body = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    face: nn.Module = object.__new__(type(kind.__name__, (_Face, kind), body))
    nn.Module.__init__(face)
    common = nn.Module().__dict__.keys()
    face.__dict__.update({name: value for name, value in original.__dict__.items() if name not in common})
    face.__dict__.update({name: model.__dict__[name] for name in _SHARED})
    face.__dict__.update(_frac_model=model, _add_cost=add_cost, training=model.training)
    return face


class Labels(NamedTuple):
    """Labels of a batch: their number, and their share 0..1 of those of the optimizer step."""

    number: Tensor
    share: Tensor


def labels_of(original: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> Labels | None:
    """The labels of a batch, counted as Trainer does; ``None`` if it did not count those of the step."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if num_items_in_batch is None or not isinstance(labels, Tensor):
        return None
    if "shift_labels" not in inputs and _shifts(original):
        labels = labels[..., 1:]
    number = labels.ne(-100).sum()
    return Labels(number, number / torch.as_tensor(num_items_in_batch, device=number.device).clamp(min=1))


def _shifts(original: nn.Module) -> bool:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    causal = LOSS_MAPPING.get(str(getattr(original, "loss_type", None))) is ForCausalLMLoss
    return _SHIFTS and causal and not getattr(getattr(original, "config", None), "is_encoder_decoder", False)


def _stored(model: FracModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.numel()}


def _loss_of(output: Any) -> Tensor | None:
    """The loss, found as Trainer finds it."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple):
        loss = output[0]
    else:
        return None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _with_loss(output: Any, loss: Tensor) -> Any:
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def frac_model_of(model: Any) -> Any:
    """The rewritten model behind the one that Trainer has; another model as it is."""
    return model.__dict__.get("_frac_model", model)
