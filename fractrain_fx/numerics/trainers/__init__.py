"""Files that tell other people's trainers which layers to train in low precision."""

from fractrain_fx.numerics.trainers.layers import TRAINERS, LayerPrecisions, layer_precisions

__all__ = ["TRAINERS", "LayerPrecisions", "layer_precisions"]
