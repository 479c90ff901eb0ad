"""Upload and download of a rewritten model (Hugging Face Hub); imported only when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from fractrain_fx.errors import RunError
from fractrain_fx.model.saving import FILES

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["fetch", "push"]

_CARD = """---
{{ card_data }}
---

A {{ architecture }} rewritten for training in fractional precision (FracTrain, method `{{ method }}`) with
fractrain_fx. Load it around a fresh model of the same architecture:

```python
from fractrain_fx import FracModel

model = FracModel.from_pretrained("{{ repo_id }}", model=...)  # a {{ architecture }}
plain = model.restore()  # the original class, with these weights
```
"""


class _OnHub(
    ModelHubMixin,
    model_card_template=_CARD,
    library_name="fractrain_fx",
    paper_url="https://arxiv.org/abs/2012.13113",
    tags=["fractrain", "quantization", "low-precision-training"],
):
    """A FracModel as a ``ModelHubMixin``. FracModel itself is not one, so that its import stays quick."""

    def __init__(self, model: FracModel) -> None:
        self._model = model

    def _save_pretrained(self, save_directory: Path) -> None:
        self._model.save_pretrained(save_directory)


def push(model: FracModel, repo_id: str, **options: Any) -> Any:
    """Save a model into a temporary folder and upload it in one commit."""
    card = {
        "architecture": type(model._state.original).__name__,
        "method": model.frac_config.method,
        "repo_id": repo_id,
    }
    options["model_card_kwargs"] = card | (options.get("model_card_kwargs") or {})
    return _OnHub(model).push_to_hub(repo_id, **options)


def fetch(repo_id: str, **options: Any) -> Path:
    """Download the files of a saved model, or find them in the cache.

    Raises:
        RunError: there is no such directory or repository, or it cannot be reached.
    """
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(FILES), **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RunError(
            f"{repo_id} is neither a directory that save_pretrained wrote nor a repository that can be "
            f"downloaded: {error}"
        ) from error
