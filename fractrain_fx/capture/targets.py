"""Write an intercepted call as a node: methods by name, operators, closures over values that a graph cannot hold."""

from __future__ import annotations

import builtins
import inspect
import operator
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx.graph import inplace_methods

from fractrain_fx.capture.trees import holds_tensor

__all__ = [
    "ADDS",
    "CONTRACTIONS",
    "DATA_DEPENDENT",
    "FORM_READS",
    "IN_PLACE_OPERATORS",
    "TEXT_READS",
    "TRUTH_READS",
    "Target",
    "call_name",
    "call_through",
    "function_node",
    "getter_name",
    "gives_values",
    "is_product",
    "operator_name",
    "resolve",
]

Target = tuple[str, Any]
"""``op`` of a node ("call_function" or "call_method") and its ``target``."""

OWN_BACKWARD = "has_own_backward"
"""The attribute of a node's function that is an ``autograd.Function``."""

_CONVOLUTIONS = frozenset(f"{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3))

CONTRACTIONS = frozenset(
    {"linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"}
    | {"conv_transpose3d", "convolution", "conv_tbc", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm"}
    | {"mv", "dot", "vdot", "addmm", "addmm_", "addmv", "addbmm", "baddbmm", "baddbmm_", "einsum"}
    | {"tensordot", "chain_matmul", "inner", "scaled_dot_product_attention", "_grouped_mm", "grouped_mm"}
    | {"multi_dot", "linalg_multi_dot"}
)
"""Names of calls that multiply and add up along a shared dimension."""

# torch's names of all calls that do, of lower-level operators too: ``_sparse_mm``, ``linalg_vecdot``, ``fft_rfft2``.
_PRODUCT = re.compile(
    r"(^|_)([a-z]*(mm|mv|dot|matmul)|conv(olution|_tbc|(_[a-z]+)?[123]d)|linear|inner|outer|addr|ger|kron|cov|corrcoef"
    r"|[cp]dist|lstm|gru|rnn|(flex|flash|head)_attention|matrix_(power|exp)|i?[hr]?fft[2n]?|ihfft[2n]?|i?stft)(_|$)"
)
_NAMESPACES = re.compile("^(linalg|fft)_")
_ALIASES: Mapping[str, str] = {"linalg_matmul": "matmul"}
"""Calls that take the same arguments as another one."""

ADDS = frozenset({"add", "iadd", "add_", "__add__", "__radd__", "__iadd__"})
"""Names of calls that add two tensors."""

FORM_READS = frozenset(
    {name for name in dir(Tensor) if name.startswith("is_")} - {"is_nonzero"}
    | {"__len__", "dim", "dim_order", "ndim", "ndimension", "dense_dim", "sparse_dim", "_dimI", "_dimV", "_is_view"}
    | {"dtype", "type", "element_size", "itemsize", "storage_type", "storage_offset", "qscheme", "q_per_channel_axis"}
    | {"result_type", "promote_types", "can_cast", "cudnn_is_acceptable"}
    | {"device", "get_device", "__dlpack_device__", "layout", "name", "names", "has_names", "output_nr", "_version"}
    | {"grad", "grad_fn", "grad_dtype", "requires_grad", "retains_grad", "_grad", "_grad_fn", "_base"}
    | {"_backward_hooks", "_post_accumulate_grad_hooks", "volatile", "__dir__"}
    | {"register_hook", "register_post_accumulate_grad_hook"}
)
"""Names of calls that give Python no tensor and tell only of a tensor's form, place or gradient."""

TRUTH_READS = frozenset({"__bool__", "is_nonzero", "item"})
"""Names of calls that may give the truth value of one tensor."""

TEXT_READS = frozenset({"__repr__", "__str__", "__format__"})
"""Names of calls that give a tensor's values as text."""

DATA_DEPENDENT = frozenset(
    {"nonzero", "nonzero_static", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim"}
    | {"bincount"}
)
"""Names of calls whose result has a shape that depends on values."""

IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in inplace_methods)
"""Operators that write to their first operand."""


def _methods() -> dict[int, str]:
    names: dict[int, str] = {}
    for name in dir(Tensor):
        value = getattr(Tensor, name)
        if callable(value) and (id(value) not in names or names[id(value)].startswith("__")):
            names[id(value)] = name
    return names


# Wrappers report odd names (``pow`` for ``__rpow__``), so methods are recognised by identity.
_METHODS = _methods()

_NAMES = {*_METHODS.values()} - {"abs", "index"}

# Methods that are operators when called with operands alone: both spellings come from ``x + y`` and the like.
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: op for name, op in vars(operator).items() if name in _NAMES},
    "__div__": operator.truediv,
}
_REFLECTED: Mapping[str, Callable[..., Any]] = {
    reflected: op for name, op in _OPERATORS.items() if (reflected := f"__r{name[2:]}") in _NAMES
}
_ARITY = {op: len(inspect.signature(op).parameters) for op in _OPERATORS.values()}


def call_name(target: Any) -> str:
    """The plain name of a function: ``mm`` for ``aten.mm.default``, ``matmul`` for ``torch.linalg.matmul``."""
    name = str(getattr(target, "__name__", "")).removesuffix(".default")
    return _ALIASES.get(name, name)


def operator_name(func: Any) -> str | None:
    """The name of an operator in torch's registry (``aten::mm``); ``None`` for other functions."""
    name = getattr(getattr(func, "overloadpacket", func), "_qualified_op_name", None)
    return None if name is None else str(name)


def gives_values(name: str, result: Any) -> bool:
    """Whether a call of this name that returned ``result`` shows Python values of the tensors that it was given."""
    if result is None or result is NotImplemented or holds_tensor(result):
        return False
    parts_of_nothing = isinstance(result, (tuple, list)) and not result
    return not parts_of_nothing and name.partition(".")[0] not in FORM_READS


def is_product(name: str) -> bool:
    """Whether torch has a call of this name that multiplies and adds up along a shared dimension."""
    operator_name = _NAMESPACES.sub("", name.partition(".")[0])
    return name in CONTRACTIONS or _PRODUCT.search(operator_name) is not None


def getter_name(func: Any) -> str | None:
    """Name of the property that ``func`` reads or writes, from its owner: torch makes a new wrapper at each access."""
    if getattr(func, "__name__", None) not in ("__get__", "__set__", "__delete__"):
        return None
    owner = func.__self__
    return str(getattr(owner, "__name__", None) or owner.fget.__name__)


def resolve(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Target, tuple[Any, ...]]:
    """Target of the node for a call, and its arguments in the order that the target wants."""
    name = _METHODS.get(id(func))
    if name is None:
        return ("call_function", func), args
    if name in _OPERATORS and not kwargs and len(args) == _ARITY[_OPERATORS[name]]:
        return ("call_function", _OPERATORS[name]), args
    if name in _REFLECTED and not kwargs and len(args) == 2:
        return ("call_function", _REFLECTED[name]), args[::-1]
    return ("call_method", name), args


def function_node(call: Callable[..., Any], name: str, *, own_backward: bool = False) -> Callable[..., Any]:
    """A plain function that makes ``call``, with a name that generated code can use.

    ``own_backward``: whether it is an ``autograd.Function``, whose gradient is not that of its forward.
    """

    def target(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    target.__name__ = target.__qualname__ = name
    if own_backward:
        setattr(target, OWN_BACKWARD, True)
    return target


def _without_override_check(func: Any) -> Callable[..., Any]:
    """The same function with ``has_torch_function`` always false, so that its body runs and is recorded."""
    changed = {**func.__globals__, "has_torch_function": lambda _: False, "__builtins__": builtins}
    copy = types.FunctionType(func.__code__, changed, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_attention = _without_override_check(F.multi_head_attention_forward)


def _with_batch(func: Any) -> Callable[..., Any]:
    """A convolution of one sample without a batch dimension, as torch computes it: in a batch of one."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(x.unsqueeze(0), *args, **kwargs).squeeze(0)

    return call


def call_through(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The function to call instead of ``func`` to record the calls inside it; ``None`` if it is one node."""
    name = call_name(func)
    if name in _CONVOLUTIONS:
        arguments = dict(zip(("input", "weight"), args, strict=False)) | dict(kwargs)
        x, weight = arguments.get("input"), arguments.get("weight")
        if args and isinstance(x, Tensor) and isinstance(weight, Tensor) and x.ndim == weight.ndim - 1:
            return _with_batch(func)
    return _attention if func is F.multi_head_attention_forward else None
