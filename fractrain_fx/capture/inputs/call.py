"""Turn the arguments of a call into the placeholders of the graph, and notice that a forward changes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.compare import equal
from fractrain_fx.capture.inputs.form import attributes_of, fits, form_of, require_tensors, shown_form
from fractrain_fx.capture.source import forward_line, in_words
from fractrain_fx.capture.trees import PLAIN, holds_tensor, is_strided, items_of, map_copies, tensors_in
from fractrain_fx.errors import CaptureError, InputError

__all__ = ["Arguments", "CallSpec", "Example", "describe_call"]

_IMMUTABLE = (Tensor, *PLAIN)
_Parts = dict[Any, Any]


@dataclass(frozen=True)
class CallSpec:
    """The form of call that a graph was recorded with.

    Attributes:
        placeholders: names of the graph's inputs: the arguments that hold tensors.
        positional: names of the arguments that may be passed by position, in order; those of ``*args`` are numbered.
        forms: for each placeholder its form.
        constants: name and form of the arguments that were passed and hold no tensor.
        defaults: name and form of the arguments that a call may leave out.
        extra: names of the arguments of ``**kwargs``, in order: code can see the order of these.
        implied: arguments that the recorded call got although the example had not passed them.
    """

    placeholders: tuple[str, ...]
    forms: tuple[Any, ...]
    positional: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    defaults: tuple[tuple[str, Any], ...]
    extra: tuple[str, ...] = ()
    implied: tuple[tuple[str, Any], ...] = ()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Values for the placeholders, in order.

        Raises:
            InputError: an argument is missing, was not in the recorded call, or has another form or constant value.
        """
        if len(args) > len(self.positional):
            raise InputError(
                f"the call has {len(args)} positional arguments; it was recorded with at most {len(self.positional)} "
                f"({', '.join(self.positional)}): pass the same, or record the model with this call's arguments"
            )
        arguments = dict(zip(self.positional, args, strict=False))
        for name, value in kwargs.items():
            if name in arguments:
                raise InputError(f"argument {name!r} is passed twice, by position and by name")
            arguments[name] = value
        values = []
        for name, form in zip(self.placeholders, self.forms, strict=True):
            if arguments.get(name) is None:
                raise InputError(
                    f"argument {name!r} is missing, and the graph was recorded with it: pass it, or record the model "
                    "without it in example_kwargs"
                )
            value = arguments.pop(name)
            _require(name, value, form)
            values.append(value)
        for name, recorded in self.constants:
            if name not in arguments:
                raise InputError(
                    f"argument {name!r} is missing; the graph was recorded with {name}={shown_form(recorded)}: pass it"
                )
            _require(name, arguments.pop(name), recorded)
        for name, default in self.defaults:
            if name in arguments:
                _require(name, arguments.pop(name), default)
        for name, value in arguments.items():
            _require(name, value, None)
        order = [name for name in kwargs if name in self.extra]
        if len(order) > 1 and order != list(self.extra):
            raise InputError(
                f"arguments come in the order {', '.join(order)}, but the graph was recorded with them in the order "
                f"{', '.join(self.extra)}: forward takes them as **kwargs, so it may depend on that. Keep to one order"
            )
        return tuple(values)

    def example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        """A call of this form."""
        return Example(self, dict(zip(self.placeholders, self.bind(args, kwargs), strict=True)), args, kwargs)


def _require(name: str, value: Any, recorded: Any) -> None:
    if not fits(recorded, value):
        raise InputError(
            f"argument {name!r} is {shown_form(form_of(value))}, but the graph was recorded with "
            f"{shown_form(recorded)}: record the model with {name!r} in the example inputs as you will pass it"
        )


@dataclass(frozen=True)
class Example:
    """One call of a model, its arguments named.

    Attributes:
        spec: the form that later calls must have.
        tensors: name and value of each argument that holds tensors, in the order of the signature.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    spec: CallSpec
    tensors: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def renewed(self) -> Example:
        """The same call on copies of its tensors, with their strides: a model may write to its inputs."""
        inputs = {id(x) for x in tensors_in(self.tensors)}

        def renew(x: Tensor) -> Tensor:
            # A default that is passed on is a constant of the graph, and not an input.
            return _copied(x.detach()).requires_grad_(x.requires_grad) if id(x) in inputs else x

        return self.spec.example(*map_copies((self.args, self.kwargs), renew))

    def with_other_values(self, *, moved: bool = False) -> Example | None:
        """The same call with floats of half the size and the other sign; ``None`` if it has none but 0, 1 and masks.

        ``moved``: the values of all tensors change places, also those of tokens and masks.
        """
        tensors = [x for x in tensors_in(self.tensors) if is_strided(x) and not x.is_meta]
        floats = [x for x in tensors if x.is_floating_point()]
        numbers = {id(x) for x in floats if not ((x == 0) | (x == 1) | x.isinf()).all()}
        changed = {id(x) for x in tensors} if moved else numbers

        def change(x: Tensor) -> Tensor:
            if id(x) not in changed:
                return x
            other = -0.5 * x.detach() if id(x) in numbers else x.detach()
            other = other.flatten().roll(1).reshape(x.shape) if moved else other
            return other.requires_grad_(x.requires_grad)

        return self.spec.example(*map_copies((self.args, self.kwargs), change)) if changed else None

    def run(self, model: nn.Module) -> Any:
        """The output of a model for such copies."""
        call = self.renewed()
        return model(*call.args, **call.kwargs)


def _copied(x: Tensor) -> Tensor:
    copy = x.clone()
    if copy.layout is not torch.strided or copy.is_nested or copy.stride() == x.stride() or x.is_meta:
        return copy
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride(), 0)


class Arguments:
    """The contents of a call's containers and objects before a recorded run.

    Changes of the tensors themselves are part of the graph.
    """

    def __init__(self, call: Example) -> None:
        self._held: dict[int, tuple[str, Any, _Parts]] = {}
        for name, value in (*zip(call.spec.positional, call.args, strict=False), *call.kwargs.items()):
            self._hold(name, value)

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, _IMMUTABLE) or id(value) in self._held:
            return
        parts = _parts(value)
        self._held[id(value)] = name, value, parts
        for part in parts.values():
            self._hold(name, part)

    def notes(self, model: nn.Module, output: Any) -> list[str]:
        """Warnings about changed arguments that the forward also returns, so that nothing is lost.

        Raises:
            CaptureError: the forward changed another argument.
        """
        returned = set(_inside(output))
        notes = []
        for name, value, before in self._held.values():
            now = _parts(value)
            keys = [key for key in {**before, **now} if not _same(before, now, key)]
            if not keys:
                continue
            place = f"its argument {name!r} ({type(value).__name__}) at {', '.join(repr(key) for key in keys[:3])}"
            if id(value) not in returned:
                raise CaptureError(
                    f"{in_words(model)} changes {place}, which a graph does not do. Return the new values "
                    "instead, or switch off the cache or list that it fills in the example inputs"
                )
            notes.append(f"forward changes {place}. The rewritten model only returns it: read it from there")
        return notes


def _parts(value: Any) -> _Parts:
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    return {**dict(items_of(value) or ()), **dict(attributes_of(value))}


def _same(before: _Parts, now: _Parts, key: Any) -> bool:
    if key not in before or key not in now:
        return False
    a, b = before[key], now[key]
    return a is b or (isinstance(a, PLAIN) and equal(a, b))


def _inside(value: Any) -> Iterator[int]:
    if not isinstance(value, _IMMUTABLE):
        yield id(value)
        for _, part in items_of(value) or ():
            yield from _inside(part)


def describe_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
    """Name the arguments of a call.

    Caches of keys and values serve to generate text, not to train: ``use_cache=False`` is added if ``forward`` takes it
    and the call does not pass it.

    Raises:
        InputError: the arguments do not fit the signature of ``forward``, or hold arrays of numpy.
    """
    signature = inspect.signature(model.forward)
    kwargs = dict(kwargs)
    implied = {"use_cache": False} if "use_cache" not in kwargs and _takes_cache(model, signature) else {}
    try:
        bound = signature.bind(*args, **kwargs, **implied)
    except TypeError as error:
        line = forward_line(model)
        at = f" at {line}" if line else ""
        raise InputError(
            f"the example inputs do not fit {type(model).__name__}.forward{signature}{at}: {error}. "
            "Pass example_inputs=(...) and example_kwargs={...} as you call the model"
        ) from error
    named: dict[str, Any] = {}
    positional: list[str] = []
    defaults: list[tuple[str, Any]] = []
    in_order: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            extra = {f"{name}_{i}": value for i, value in enumerate(bound.arguments.get(name, ()))}
            positional += extra
            named |= extra
        elif parameter.kind is parameter.VAR_KEYWORD:
            extra = bound.arguments.get(name, {})
            in_order = [key for key in extra if key not in implied]
            named |= {key: extra[key] for key in in_order}
            defaults += [(key, value) for key, value in implied.items() if key in extra]
        else:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(name)
            if name in bound.arguments and name not in implied:
                named[name] = bound.arguments[name]
            else:
                defaults.append((name, implied.get(name, parameter.default)))
    for name, value in named.items():
        require_tensors(name, value)
    tensors = {name: value for name, value in named.items() if holds_tensor(value)}
    spec = CallSpec(
        placeholders=tuple(tensors),
        forms=tuple(map(form_of, tensors.values())),
        positional=tuple(positional),
        constants=tuple((name, form_of(value)) for name, value in named.items() if name not in tensors),
        defaults=tuple((name, form_of(value, passed=False)) for name, value in defaults),
        extra=tuple(in_order),
        implied=tuple(implied.items()),
    )
    return Example(spec, tensors, tuple(args), kwargs | implied)


def _takes_cache(model: nn.Module, signature: inspect.Signature) -> bool:
    if "use_cache" in signature.parameters:
        return True
    passes_on = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    config = getattr(model, "config", None)
    # In a model of text and images only the configuration of the text part has the setting.
    parts = [config, *vars(config).values()] if config is not None and hasattr(config, "__dict__") else []
    return passes_on and any(getattr(part, "use_cache", False) is True for part in parts)
