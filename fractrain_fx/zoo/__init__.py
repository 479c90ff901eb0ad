"""The paper's models."""

from fractrain_fx.zoo import models

__all__ = ["models"]
