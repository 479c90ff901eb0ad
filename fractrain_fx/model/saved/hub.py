"""Upload and download of a rewritten model (Hugging Face Hub); imported only when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from fractrain_fx.errors import RunError
from fractrain_fx.model.frozen.packing import Packable
from fractrain_fx.model.saved.folder import FILES, save

__all__ = ["fetch", "push"]


class _OnHub(ModelHubMixin, library_name="fractrain_fx"):
    """A FracModel as a ``ModelHubMixin``. FracModel itself is not one, so that its import stays quick."""

    def __init__(self, model: Packable, repo_id: str) -> None:
        self._model, self._repo_id = model, repo_id

    def _save_pretrained(self, save_directory: Path) -> None:
        save(self._model, save_directory, self._repo_id)


def push(model: Packable, repo_id: str, **options: Any) -> Any:
    """Save a model into a temporary folder and upload it in one commit."""
    return _OnHub(model, repo_id).push_to_hub(repo_id, **options)


def fetch(repo_id: str, **options: Any) -> Path:
    """Download the files of a saved model, or find them in the cache."""
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(FILES), **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RunError(
            f"{repo_id} is neither a directory that save_pretrained wrote nor a repository that can be "
            f"downloaded: {error}"
        ) from error
