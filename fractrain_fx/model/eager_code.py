"""The generated code of a graph as it runs in eager mode: it reads dictionaries instead of attributes of modules.

``self.layer.weight`` looks both names up by Python code of ``nn.Module``, which takes as long as a small layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.graph import _format_target

from fractrain_fx.capture import RecordedModule
from fractrain_fx.execution.blocks.maskless_relu import MasklessReLU
from fractrain_fx.nn.cost import CostMeter

__all__ = ["eager_forward"]

_KEY = "_eager_forward"


def eager_forward(graph_module: RecordedModule) -> Callable[..., Any]:
    """The forward of a graph module, as a function of the module and the inputs; its lines are those of the code."""
    code, known = graph_module._code, graph_module.__dict__.get(_KEY)
    if known is not None and known[0] is code:
        forward: Callable[..., Any] = known[1]
        return forward
    shorter = {node.name: pair for node in graph_module.graph.nodes if (pair := _shorter(graph_module, node))}
    lines = []
    for line in code.splitlines():
        name = line.strip().partition(" ")[0].removesuffix(":")
        old, new = shorter.get(name, ("", ""))
        lines.append(line.replace(f"= {old}", f"= {new}", 1) if old else line)
    names: dict[str, Any] = {}
    plain = type(graph_module).forward
    exec(compile("\n".join(lines), plain.__code__.co_filename, "exec"), dict(plain.__globals__), names)
    graph_module.__dict__[_KEY] = code, names["forward"]
    forward = names["forward"]
    return forward


def _shorter(graph_module: RecordedModule, node: Node) -> tuple[str, str] | None:
    """The expression of the attribute or module that a node reads in the generated code, and a quicker one."""
    if node.op not in ("get_attr", "call_module"):
        return None
    target = str(node.target)
    module = graph_module.get_submodule(target) if node.op == "call_module" else None
    # Only compiled graphs need another form of a ReLU.
    place = _place(graph_module, module.original.path if isinstance(module, MasklessReLU) else target)
    if place is None:
        return None
    return _format_target("self", target), f"{place}.forward" if isinstance(module, CostMeter) else place


def _place(graph_module: RecordedModule, target: str) -> str | None:
    *parents, name = target.split(".")
    module: Any = graph_module
    words = "self"
    for parent in parents:
        module, words = module._modules.get(parent), f"{words}._modules[{parent!r}]"
        if module is None or isinstance(module, torch.jit.ScriptModule):  # whose dictionaries are made at each look-up
            return None
    for kind in ("_modules", "_parameters", "_buffers"):
        if getattr(module, kind).get(name) is not None:
            return f"{words}.{kind}[{name!r}]"
    return None
