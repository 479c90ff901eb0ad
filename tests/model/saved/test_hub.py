"""The Hugging Face Hub, up to the network's edge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch

from fractrain_fx import FracModel, fractrainify
from fractrain_fx.errors import ConfigError, RunError
from fractrain_fx.model.saved import hub
from fractrain_fx.model.saved.folder import FILES
from tests.models import build


@pytest.fixture
def uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an upload ends up, in place of the Hub."""
    api = MagicMock()
    api.return_value.create_repo.side_effect = lambda repo_id, **_: MagicMock(repo_id=repo_id)

    def upload_folder(*, repo_id: str, folder_path: Path, **_: Any) -> str:
        shutil.copytree(folder_path, tmp_path / repo_id)
        return f"https://huggingface.co/{repo_id}/commit/1"

    api.return_value.upload_folder.side_effect = upload_folder
    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", api)
    monkeypatch.setattr(hub, "snapshot_download", lambda repo_id, allow_patterns, **_: str(tmp_path / repo_id))
    return tmp_path


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_a_pushed_model_comes_back_from_its_repository(way: str, uploaded: Path) -> None:
    case = build("tied_weights")
    model = fractrainify(case.model, example_inputs=case.args, check=False)
    if way == "push_to_hub":
        assert model.push_to_hub("me/small", private=True).endswith("me/small/commit/1")
    else:
        model.save_pretrained(uploaded / "local", push_to_hub=True, repo_id="me/small")
        assert {path.name for path in (uploaded / "local").iterdir()} == set(FILES)
    files = {path.name for path in (uploaded / "me/small").iterdir()}
    assert files == set(FILES)
    card = (uploaded / "me/small/README.md").read_text()
    assert "library_name: fractrain_fx" in card and "from_pretrained('me/small', model=...)  # a TiedWeights" in card
    loaded = FracModel.from_pretrained("me/small", model=build("tied_weights").model, revision="main")
    mine, theirs = loaded.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_cannot_be_found_or_means_nothing_is_said(tmp_path: Path) -> None:
    case = build("tied_weights")
    with pytest.raises(RunError, match=r"me/none is neither a directory .* nor a repository"):
        FracModel.from_pretrained("me/none", model=case.model, local_files_only=True)
    model = fractrainify(case.model, example_inputs=case.args, check=False)
    with pytest.raises(ConfigError, match="push_to_hub=True"):
        model.save_pretrained(tmp_path, repo_id="me/small")
