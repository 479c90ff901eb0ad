"""The settings that the paper prints (supplement 4 to 7), whatever the defaults are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fractrain_fx.config.precision import DFQ_OPTIONS
from fractrain_fx.errors import ConfigError, near

__all__ = ["paper_values"]

_STAGES = {"schedule": {"kind": "auto", "epsilon": 0.05, "alpha": 0.3}}
_GATE = {"control": "sign", "dims": [32, 16], "hidden": 16}
_OPTIONS = {"options": list(map(str, DFQ_OPTIONS)), "weight_bits": 6, "gate": _GATE}
_VALUES: dict[str, dict[str, Any]] = {
    "float": {},
    "static": {"precision": "FW-8/BW-8"},
    "pfq": {"stages": "FW(3,4,6,8)/BW(6,6,8,8)", **_STAGES},
    "dfq": {**_OPTIONS, "targets": {"per_cent": [3.0], "saturate": True}},
    "fractrain": {**_OPTIONS, "targets": {"per_cent": [1.5, 2.0, 2.5, 3.0], "saturate": True}, **_STAGES},
    "slu": {"gate": _GATE},
}


def paper_values(method: str) -> Mapping[str, Any]:
    """The settings of a method in the paper, as :meth:`FracConfig.from_dict` takes them.

    Raises:
        ConfigError: there is no such method.
    """
    if method not in _VALUES:
        raise ConfigError(f"method {method!r} is unknown: write one of {', '.join(_VALUES)}.{near(method, _VALUES)}")
    return _VALUES[method]
