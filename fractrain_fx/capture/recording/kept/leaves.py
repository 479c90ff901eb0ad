"""Decide which modules stay one node: modules with nothing to quantize, and modules that hide their calls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules import activation, batchnorm, dropout, instancenorm, normalization, pooling

from fractrain_fx.capture.recording.writer import nodes_after
from fractrain_fx.capture.source import listed
from fractrain_fx.capture.targets import ADDS

__all__ = ["Depth", "adds_inputs", "depth_of", "hooks_left_out", "hooks_of", "opaque_reason", "without_users_hooks"]

_NORMS = (batchnorm._NormBase, instancenorm._InstanceNorm)
_NORM_MODULES = (normalization.__name__, batchnorm.__name__, instancenorm.__name__)
_LEAF_MODULES = (activation.__name__, dropout.__name__, pooling.__name__, *_NORM_MODULES)
_LEAF_TYPES = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.PReLU)


# Methods and hooks of a model itself that its rewritten form, a module of another class, does not have.
_SAVES_OR_LOADS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_OVERRIDDEN = (*_SAVES_OR_LOADS, "get_extra_state", "set_extra_state", "zero_grad", "requires_grad_")
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", *_LOAD_HOOKS)


class Depth(Enum):
    """How deep a recording goes into a module."""

    LEAF = "one node"
    MAYBE = "one node, unless it computes a contraction that is trained, or a sum of trained inputs"
    THROUGH = "every call inside"


def depth_of(module: nn.Module) -> Depth:
    """Decide from classes and parameters alone, never from names of models."""
    if isinstance(module, (nn.MultiheadAttention, nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return Depth.THROUGH if len(module._modules) else Depth.MAYBE
    if isinstance(module, _LEAF_TYPES) or (_is_norm(module) and _only_vectors(module)):
        return Depth.LEAF
    if any(base.__module__ in _LEAF_MODULES for base in type(module).__mro__) and _only_vectors(module):
        return Depth.LEAF
    if not module._modules and not any(p is not None for p in module._parameters.values()):
        return Depth.MAYBE
    return Depth.THROUGH


def adds_inputs(last: Node, inputs: Iterable[Tensor]) -> bool:
    """Whether a module adds trained tensors that it was given, as a module for the end of a residual block does.

    Its calls are the nodes after ``last``.
    """
    if len({id(x) for x in inputs if x.requires_grad}) < 2:
        return False
    for node in nodes_after(last):
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name in ADDS and len(set(node.all_input_nodes)) == 2:
            return True
    return False


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or any("norm" in base.__name__.lower() for base in type(module).__mro__)


def _only_vectors(module: nn.Module) -> bool:
    """Whether all parameters scale or shift features: at most one dimension is longer than one."""
    return all(sum(size > 1 for size in p.shape) <= 1 for p in module.parameters())


def opaque_reason(module: nn.Module) -> str | None:
    """The reason that a module's recorded calls would not be all that it does, or ``None``."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module, whose calls are not seen; use the Python class to have its inside recorded"
    for kind, hooks, key in _users_hooks(module):
        return f"it has a {kind} hook ({_name(hooks[key])}), which only a call of the module runs"
    return None


def hooks_left_out(model: nn.Module) -> list[str]:
    """Warnings about hooks on the model itself. The code around the graph belongs to the rewritten model."""
    words = {
        "forward": ", except that its torch operations are in the graph: register it on the rewritten model if it does "
        "anything else",
        "backward": ": register it on the rewritten model",
    }
    notes = [
        f"the {kind} hook {_name(hooks[key])} of the model itself is not called any more{words[kind]}"
        for kind, hooks, key in _users_hooks(model)
    ]
    own = [name for name in _OVERRIDDEN if getattr(type(model), name) is not getattr(nn.Module, name)]
    if own := own + [name for name in _STATE_HOOKS if getattr(model, name)]:
        notes.append(
            f"the model's own {listed(own)} is not run by the rewritten model, which saves, loads, freezes and clears "
            "in the way of torch: call it on the model that was rewritten, whose parameters are the same"
        )
    return notes


def _users_hooks(module: nn.Module) -> list[tuple[str, dict[int, Any], int]]:
    """Kind, dictionary and key of each hook that is not part of the module's computation."""
    forward = ("forward", module._forward_hooks), ("forward", module._forward_pre_hooks)
    backward = ("backward", module._backward_hooks), ("backward", module._backward_pre_hooks)
    return [
        (kind, hooks, key)
        for kind, hooks in (*forward, *backward)
        for key, hook in hooks.items()
        if not _belongs_to(module, hook)
    ]


def hooks_of(model: nn.Module) -> Iterator[int]:
    """The keys of all hooks of a model's modules that are not part of their computation."""
    return (key for module in model.modules() for _, _, key in _users_hooks(module))


@contextlib.contextmanager
def without_users_hooks(model: nn.Module, kept: Container[int] = ()) -> Iterator[None]:
    """Run no hooks inside that are not part of the modules' computation, but those in ``kept``.

    Hooks on gradients of parameters do not run either: code around the model may count with them.
    """
    entries = [(hooks, key) for module in model.modules() for _, hooks, key in _users_hooks(module) if key not in kept]
    entries += [(hooks, key) for p in model.parameters() if (hooks := p._backward_hooks) for key in hooks]
    before = [(hooks, dict(hooks)) for hooks, _ in entries]
    for hooks, key in entries:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, held in before:
            hooks.clear()
            hooks.update(held)


def _belongs_to(module: nn.Module, hook: object) -> bool:
    """Whether a hook is part of the module's computation: torch's (such as weight norm), or from the same library.

    The tensor operations of such hooks are recorded like any other call. Code that is not installed is the user's,
    whose hooks may do anything.
    """
    source = str(getattr(hook, "__module__", None) or type(hook).__module__)
    package = type(module).__module__.partition(".")[0]
    if source.startswith("torch.nn.utils."):
        return True
    return package != "torch" and source.partition(".")[0] == package and _is_installed(source)


def _is_installed(name: str) -> bool:
    """Whether a Python module lies among installed packages."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
