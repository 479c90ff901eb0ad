"""Write hooks on tensors as nodes: a graph registers them again at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd import graph as autograd_graph
from torch.utils.hooks import RemovableHandle

from fractrain_fx.capture.recording.arguments import argument
from fractrain_fx.capture.recording.effects import refused
from fractrain_fx.capture.recording.writer import UnrepresentableError
from fractrain_fx.capture.targets import function_node
from fractrain_fx.capture.trees import hides_tensor

if TYPE_CHECKING:
    from fractrain_fx.capture.recording.recorder import Recorder

__all__ = ["HOOKS", "History", "hook_places", "write_hook"]

HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Methods of a tensor that do something with its gradient when backward has it."""

_Build = Callable[..., Any]


def write_hook(recorder: Recorder, name: str, args: tuple[Any, ...], handle: Any) -> Any:
    """Write the registration of a hook on a tensor.

    Tensors of the run that the hook holds (in its closure, its defaults, or as arguments of a ``partial``) become
    arguments of the node, so that the hook of a later call holds those of that call.
    """
    writer = recorder.writer
    x, hook = args[0], args[1] if len(args) > 1 else None
    try:
        build, held = _opened(hook)
        operands = [argument(writer, value) for value in held]
    except UnrepresentableError as error:
        writer.block(f"its hook on a tensor holds {error}, which a graph cannot hand to it")
        return handle

    def register(tensor: Tensor, *values: Any) -> Any:
        if not tensor.requires_grad:  # without a gradient there is nothing to do
            return None
        method = getattr(tensor, name)
        return method() if hook is None else method(build(*values))

    node = writer.create("call_function", function_node(register, name), (writer.node_of(x), *operands), effect=True)
    if handle is not None:
        recorder.handles[id(handle)] = handle, node
    return handle


def hook_places(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Owner, name and replacement of what removes hooks, and of hooks that no graph can register."""
    remove = RemovableHandle.remove

    def removed(handle: RemovableHandle) -> None:
        known = recorder.handles.pop(id(handle), None)
        if known is not None and not recorder.writer.paused and not known[1]._erased:
            recorder.writer.create("call_function", _remove, (known[1],), effect=True)
        remove(handle)

    saved, several = autograd_graph.saved_tensors_hooks, "register_multi_grad_hook"
    many = refused(recorder, autograd_graph.register_multi_grad_hook, "registers a hook on several tensors")
    enter = refused(recorder, saved.__enter__, "registers hooks on tensors that are saved for backward")
    return [(RemovableHandle, "remove", removed), (autograd_graph, several, many), (saved, "__enter__", enter)]


class History:
    """Stands for the ``grad_fn`` of a tensor while its model is recorded: code may ask whether there is one.

    ``recorder`` is told of any other use.
    """

    def __init__(self, real: Any, recorder: Recorder) -> None:
        self.__dict__.update(_real=real, _recorder=recorder)

    def __getattr__(self, name: str) -> Any:
        recorder = self.__dict__["_recorder"]
        if not recorder.writer.paused:
            recorder.writer.block(f"it reads grad_fn.{name}, and a graph has other nodes of autograd")
        return getattr(self.__dict__["_real"], name)


def _remove(handle: Any) -> None:
    if handle is not None:
        handle.remove()


def _opened(hook: Any) -> tuple[_Build, list[Any]]:
    """The values that a hook holds and that may be of the run, and a function that makes the hook with others."""
    if isinstance(hook, functools.partial):
        build, held = _opened(hook.func)
        count, names = len(hook.args), list(hook.keywords)

        def bound(*values: Any) -> Any:
            rest = values[len(held) :]
            named = dict(zip(names, rest[count:], strict=True))
            return functools.partial(build(*values[: len(held)]), *rest[:count], **named)

        return bound, [*held, *hook.args, *hook.keywords.values()]
    if isinstance(hook, FunctionType):
        cells = [cell for cell in hook.__closure__ or () if _may_be_of_the_run(_contents(cell))]
        defaults, named = hook.__defaults__ or (), hook.__kwdefaults__ or {}

        def made(*values: Any) -> Any:
            new = {id(cell): CellType(value) for cell, value in zip(cells, values, strict=False)}
            closure = tuple(new.get(id(cell), cell) for cell in hook.__closure__ or ())
            copy = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, closure)
            rest = values[len(cells) :]
            copy.__defaults__ = tuple(rest[: len(defaults)]) or None
            copy.__kwdefaults__ = dict(zip(named, rest[len(defaults) :], strict=True)) or None
            return copy

        return made, [*map(_contents, cells), *defaults, *named.values()]
    owner = hook.__self__ if isinstance(hook, MethodType) else hook
    if owner is not None and not isinstance(owner, nn.Module) and (isinstance(owner, Tensor) or hides_tensor(owner)):
        raise UnrepresentableError(f"a {type(owner).__name__} with tensors")
    return (lambda *_: hook), []


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _may_be_of_the_run(value: Any) -> bool:
    """Whether a value may hold tensors or sizes of the run; a module, and an object without tensors, is what it is."""
    return isinstance(value, (Tensor, int, float, tuple, list, dict, slice)) and not isinstance(value, bool)
