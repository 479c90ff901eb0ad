"""Example inputs for a Hugging Face model: its configuration gives the sizes, its ``forward`` the names.

Nothing here imports transformers before it gets a model of transformers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fractrain_fx.errors import InputError

__all__ = ["HuggingFaceInputs", "is_hugging_face"]

TEXT_LENGTH, TARGET_LENGTH = 16, 12  # tokens; different, so that encoder and decoder cannot be confused
IMAGE_SIDE = 224  # for configurations without a size: the processors of convolutional models resize to this
WAVE_LENGTH = 16_000  # one second: 49 frames, more than the 10 that training masks at once
SPEECH_FRAMES = 64
CTC_LENGTH = 4
IGNORED = -100  # Hugging Face's label for "no loss here"

# families of heads (names of transformers' tables) by the kind of their labels
_NEXT_TOKENS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")
_CLASS_OF_SAMPLE = tuple(f"{kind}_CLASSIFICATION" for kind in ("SEQUENCE", "IMAGE", "AUDIO", "VIDEO"))
_CLASS_OF_TOKEN = ("TOKEN_CLASSIFICATION",)
_CLASS_OF_PIXEL = ("SEMANTIC_SEGMENTATION",)
_TRANSCRIPT = ("CTC",)


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of transformers', without importing that."""
    return any(
        kind.__module__ == "transformers.modeling_utils" and kind.__name__ == "PreTrainedModel"
        for kind in type(model).__mro__
    )


class HuggingFaceInputs:
    """Builds keyword inputs for a ``PreTrainedModel`` on the CPU."""

    def __init__(self, model: nn.Module, batch: int, generator: Generator) -> None:
        self.model = model
        self.config: Any = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.batch = batch
        self.generator = generator
        self.inputs: dict[str, Tensor] = {}
        self.padded = torch.zeros(batch, 0, dtype=torch.bool)  # set with the text

    def build(self, labels: bool) -> dict[str, Tensor]:
        """The inputs, with labels or without."""
        builders = {
            "input_ids": self._text,
            "pixel_values": self._images,
            "input_values": self._sound,
            "input_features": self._spectrogram,
        }
        main = str(self.model.main_input_name)
        if main not in builders:
            raise self._unknown(f"its main input {main!r} is none of {', '.join(builders)}")
        if "input_ids" in self.parameters and self._field((self.config,), "image_token_id", "image_token_index"):
            raise self._unknown("its text holds places for images, which only its processor knows")
        for name, build in builders.items():
            # A model of text and images (CLIP) takes both, whichever is its main input.
            if name == main or (name in self.parameters and "input_ids" in self.parameters):
                build()
        if labels:
            self._labels()
        elif "decoder_input_ids" in self.parameters and not self._derives_target():
            self.inputs["decoder_input_ids"] = self._target()
        self._check_required()
        return self.inputs

    def _derives_target(self) -> bool:
        """Whether the model makes the decoder's inputs from its own inputs even without labels, as classifiers do."""
        return not self.config.is_encoder_decoder or bool(self._heads() & set(_CLASS_OF_SAMPLE))

    def _text(self) -> None:
        config = self._part("encoder", "text_config")
        positions = self._field((config,), "max_position_embeddings") or 0
        # RoBERTa and related models number positions from 2, so two stay free; XLNet's -1 means no limit.
        length = min(TEXT_LENGTH, positions - 2) if positions > 3 else TEXT_LENGTH
        ids = self._tokens(config, length)
        eos, pad = (self._special(config, f"{name}_token_id") for name in ("eos", "pad"))
        lengths = torch.full((self.batch, 1), length)
        lengths[-1] -= -(-length // 4)
        position = torch.arange(length)
        if eos is not None:
            # Some heads read the state at the end-of-text token, so each row needs one.
            ids[position == lengths - 1] = eos
        if pad is not None:
            ids[position >= lengths] = pad
        self.inputs["input_ids"] = ids
        self.padded = position >= lengths
        if "attention_mask" in self.parameters:
            self.inputs["attention_mask"] = (~self.padded).long()

    def _images(self) -> None:
        config = self._part("encoder", "vision_config")
        side = self._field((config, self.config), "image_size") or IMAGE_SIDE
        height, width = (side, side) if isinstance(side, int) else tuple(side)
        channels = self._field((config, self.config), "num_channels", "in_channels", "in_chans") or 3
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        self.inputs["pixel_values"] = self._noise(*frames, channels, height, width)

    def _sound(self) -> None:
        config = self._part("encoder", "audio_config")
        if hasattr(config, "num_mel_bins"):
            self.inputs["input_values"] = self._noise(config.max_length, config.num_mel_bins)
        elif hasattr(config, "conv_stride"):
            self.inputs["input_values"] = self._noise(WAVE_LENGTH)
            # Processors give no mask to models with a group norm over time, which are therefore trained without one.
            if getattr(config, "feat_extract_norm", "layer") == "layer":
                self._pad_sound("input_values")
        else:
            raise self._unknown("its configuration has neither conv_stride (waves) nor num_mel_bins (spectrograms)")

    def _spectrogram(self) -> None:
        config = self._part("encoder", "audio_config")
        if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            # Whisper: padded to its 30 seconds by silence, without a mask; its convolutions halve the length
            self.inputs["input_features"] = self._noise(config.num_mel_bins, 2 * config.max_source_positions)
            return
        width = self._field((config,), "feature_projection_input_dim", "input_feat_per_channel")
        if width is None:
            raise self._unknown("its configuration does not say how wide a frame of input_features is")
        self.inputs["input_features"] = self._noise(SPEECH_FRAMES, width * getattr(config, "input_channels", 1))
        self._pad_sound("input_features")

    def _pad_sound(self, name: str) -> None:
        if "attention_mask" in self.parameters:
            mask = torch.ones(self.inputs[name].shape[:2], dtype=torch.long)
            mask[-1, -(mask.shape[1] // 4) :] = 0
            self.inputs[name][mask == 0] = 0
            self.inputs["attention_mask"] = mask

    def _labels(self) -> None:
        """Add labels of the kind that the model's head takes; a model without a head gets none."""
        if {"start_positions", "end_positions"} <= self.parameters.keys():
            self.inputs["start_positions"] = torch.zeros(self.batch, dtype=torch.long)
            self.inputs["end_positions"] = torch.ones(self.batch, dtype=torch.long)
        elif "labels" in self.parameters:
            self.inputs["labels"] = self._labels_of_head()

    def _labels_of_head(self) -> Tensor:
        heads = self._heads()
        classes = self.config.num_labels
        if heads & set(_NEXT_TOKENS):
            if self.config.is_encoder_decoder or "input_ids" not in self.inputs:
                target = self._target()
                target[-1, -(target.shape[1] // 4) :] = IGNORED
                return target
            return self.inputs["input_ids"].masked_fill(self.padded, IGNORED)
        if heads & set(_CLASS_OF_SAMPLE):
            problem = self.config.problem_type
            if problem == "regression" or (problem is None and classes == 1):
                return self._noise(*[classes] * (classes > 1))
            if problem == "multi_label_classification":
                return self._draw(2, classes).float()
            return self._draw(classes)
        if heads & set(_CLASS_OF_TOKEN):
            return self._draw(classes, self.inputs["input_ids"].shape[1])
        if heads & set(_CLASS_OF_PIXEL):
            return self._draw(classes, *self.inputs["pixel_values"].shape[-2:])
        if heads & set(_TRANSCRIPT):
            return self._tokens(self.config, CTC_LENGTH)
        raise self._unknown("it takes labels of a kind that is not known")

    def _heads(self) -> set[str]:
        """Tables of transformers that list the model's class or one of its base classes."""
        from transformers.models.auto import modeling_auto

        names = {base.__name__ for base in type(self.model).__mro__}
        families = (*_NEXT_TOKENS, *_CLASS_OF_SAMPLE, *_CLASS_OF_TOKEN, *_CLASS_OF_PIXEL, *_TRANSCRIPT)
        tables = {name: getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").values() for name in families}
        return {
            name
            for name, table in tables.items()
            if any(not names.isdisjoint((entry,) if isinstance(entry, str) else entry) for entry in table)
        }

    def _target(self) -> Tensor:
        """Tokens for the decoder, beginning with its start token."""
        config = self._part("decoder", "text_config")
        ids = self._tokens(config, TARGET_LENGTH)
        start = self._special(config, "decoder_start_token_id")
        if start is not None:
            ids[:, 0] = start
        return ids

    def _tokens(self, config: Any, length: int) -> Tensor:
        """Ids ``[batch, length]`` of ordinary tokens: special ones would change what a model does."""
        vocab = self._field((config, self.config), "vocab_size")
        if vocab is None:
            raise self._unknown("its configuration has no vocab_size")
        ordinary = torch.ones(vocab, dtype=torch.bool)
        for name in {**self.config.to_dict(), **config.to_dict()}:
            special = self._special(config, name) if name.endswith("_token_id") else None
            if special is not None:
                ordinary[special] = False
        ids = ordinary.nonzero().flatten()
        return ids[self._draw(len(ids), length)]

    def _special(self, config: Any, name: str) -> int | None:
        """A special token's id, if it exists and is in the vocabulary (small configurations keep large ids)."""
        value = self._field((config, self.config), name)
        value = value[0] if isinstance(value, list | tuple) else value
        return value if value is not None and 0 <= value < self._field((config, self.config), "vocab_size") else None

    def _part(self, *names: str) -> Any:
        """The sub-configuration of one modality, or the configuration itself if there is only one."""
        for name in names:
            part = getattr(self.config, name, None)
            if hasattr(part, "to_dict"):
                return part
        return self.config

    @staticmethod
    def _field(configs: tuple[Any, ...], *names: str) -> Any:
        values = (getattr(config, name, None) for config in configs for name in names)
        return next((value for value in values if value is not None), None)

    def _draw(self, below: int, *size: int) -> Tensor:
        return torch.randint(below, (self.batch, *size), generator=self.generator)

    def _noise(self, *size: int) -> Tensor:
        return torch.randn(self.batch, *size, generator=self.generator)

    def _check_required(self) -> None:
        parameters = (param for name, param in self.parameters.items() if name not in self.inputs)
        named = (param for param in parameters if param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD))
        if missing := [param.name for param in named if param.default is param.empty]:
            raise self._unknown(f"its forward also needs {', '.join(missing)}")

    def _unknown(self, why: str) -> InputError:
        return InputError(
            f"example inputs for {type(self.model).__name__} cannot be guessed: {why}; "
            "pass what you call the model with as example_kwargs={...}"
        )
