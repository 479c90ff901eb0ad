"""Every model type of Hugging Face's AutoModel, from a small configuration, with the head that users train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Case, NotBuiltError, Ready
from benchmarks.coverage.checks import objective
from benchmarks.coverage.hf_inputs import inputs_for
from benchmarks.coverage.hf_shrink import PLANS, shrink
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import InputError

__all__ = ["build", "cases"]

# The head that users train comes first; a type without these heads is a bare encoder.
_HEADS = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION"),
    *("AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "SEQUENCE_CLASSIFICATION", "MASKED_LM"),
    *("QUESTION_ANSWERING", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "DEPTH_ESTIMATION", "MASKED_IMAGE_MODELING"),
    *("TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "MULTIMODAL_LM", "PRETRAINING"),
)
_LARGE = 40_000_000


def cases(sample: bool) -> list[Case]:
    """Every type of the AutoModel mapping, in the sample too."""
    # Imported here once, instead of in every forked process.
    import safetensors.torch  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit  # noqa: F401
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    del sample
    return [Case("hf", kind, kind) for kind in MODEL_MAPPING_NAMES]


def build(case: Case) -> Ready:
    """The first combination of head, labels and size that trains.

    Raises:
        NotBuiltError: no combination does; the message has the error of each.
    """
    from transformers import CONFIG_MAPPING

    torch.set_default_dtype(torch.float32)
    kind, errors, hopeless = CONFIG_MAPPING[case.name], {}, set()
    for labels in (True, False):
        for plan in PLANS:
            try:
                config = shrink(kind, plan)
            except Exception as error:  # sizes that do not fit each other
                errors[str(plan)] = _words(error)
                continue
            for auto in _heads(config, labels):
                where = f"{auto.__name__}, {'labels' if labels else 'no labels'}"
                if where in hopeless:
                    continue
                try:
                    return _ready(config, auto, labels, plan)
                except InputError as error:  # at every size
                    hopeless.add(where)
                    errors[where] = _words(error)
                except Exception as error:  # this head or these sizes are not for this type
                    errors[f"{where}, {plan}"] = _words(error)
    raise NotBuiltError(_told(errors) or "no class")


def _told(errors: dict[str, str]) -> str:
    """Each error once. The last come first: with the fewest changes they are least likely to be due to the changes."""
    seen: dict[str, str] = {}
    for where, why in reversed(errors.items()):
        seen.setdefault(why, where)
    return "; ".join(f"{where}: {why}" for why, where in list(seen.items())[:3])


def _heads(config: Any, labels: bool) -> Iterator[type[Any]]:
    """The model classes of a configuration, first with the head that users train."""
    from transformers.models.auto import modeling_auto

    seen: set[type[Any]] = set()
    tables = [f"MODEL_FOR_{head}_MAPPING" for head in _HEADS] + ["MODEL_MAPPING"] * (not labels)
    for table in tables:
        mapping = getattr(modeling_auto, table)
        classes = mapping.get(type(config), ())
        for model_class in classes if isinstance(classes, tuple | list) else (classes,):
            if model_class and model_class not in seen:
                seen.add(model_class)
                yield model_class


def _ready(config: Any, auto: type[Any], labels: bool, plan: Any) -> Ready:
    with torch.device("meta"):
        size = sum(p.numel() for p in auto._from_config(config).parameters())
    if size > _LARGE:
        raise NotBuiltError(f"{size:,} parameters")
    model = auto._from_config(config)
    kwargs, how = inputs_for(model, labels)
    with Snapshot(model).preserved():
        loss = objective(model.train()(**kwargs))
        if not loss.requires_grad or not bool(loss.isfinite()):
            raise NotBuiltError(f"its loss is {loss.item()}, {'with' if loss.requires_grad else 'without'} a gradient")
        model.eval()(**kwargs)

    def rebuild() -> nn.Module:
        made: nn.Module = auto._from_config(config)
        return made

    smaller = [name for name in ("depth", "width", "image") if getattr(plan, name)]
    return Ready(model, rebuild, (), kwargs, {"class": auto.__name__, "smaller": smaller, **how})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
