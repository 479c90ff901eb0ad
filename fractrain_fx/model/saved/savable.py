"""The part of a rewritten model that saves it and uploads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fractrain_fx.errors import ConfigError
from fractrain_fx.model.frozen.packing import Packable

__all__ = ["Savable"]


class Savable(Packable):
    """The part of :class:`fractrain_fx.FracModel` that writes it to disk and uploads it."""

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        results: Mapping[str, float] | None = None,
        push_to_hub: bool = False,
        **hub: Any,
    ) -> None:
        """Write recipe, example inputs, weights (safetensors) and a model card into a directory.

        A model of Hugging Face's is written so that ``AutoModel.from_pretrained`` of transformers loads the float model
        from the same directory; one with weights as codes is not.

        Args:
            directory: made if it does not exist.
            results: measures of the trained model for its card, by name; by default those of the last evaluation that a
                trainer made.
            push_to_hub: also upload with :meth:`push_to_hub`, to ``repo_id`` or the directory's name.
            hub: ``repo_id`` and other options of ``push_to_hub``.

        Raises:
            ConfigError: options of ``push_to_hub`` without it.
            ModelError: modules or parameters of the original were replaced.
        """
        from fractrain_fx.model.saved.folder import save

        directory = Path(directory)
        if hub and not push_to_hub:
            raise ConfigError(f"{', '.join(hub)} only matter(s) for an upload: add push_to_hub=True")
        if results is not None:
            self._state.results = {name: float(value) for name, value in results.items()}
        save(self, self._state, directory, str(hub.get("repo_id", directory.name)))
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", directory.name), **hub)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload what ``save_pretrained`` writes through huggingface_hub's ``ModelHubMixin``.

        Args:
            repo_id: repository, such as ``"user/model"``; made if it does not exist.
            options: those of ``ModelHubMixin.push_to_hub``: ``private``, ``token``, ``branch``, ``commit_message``, ...

        Returns:
            The result of ``HfApi.upload_folder``.
        """
        from fractrain_fx.model.saved.hub import push

        return push(self, self._state, repo_id, **options)
