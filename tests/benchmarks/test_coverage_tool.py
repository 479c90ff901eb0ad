"""The sweep itself: what counts as passed, limits, resuming, the table, and how configurations are made smaller."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from benchmarks.coverage import __main__ as sweep
from benchmarks.coverage import hf_models, libraries, timm_models, torchvision_models
from benchmarks.coverage.cases import Case, NotBuiltError, Ready, Suite
from benchmarks.coverage.hf_shrink import PLANS, shrink
from benchmarks.coverage.pool import Limits, run
from benchmarks.coverage.results import Results, without_paths
from benchmarks.coverage.spreadsheet import beside, write_csv
from benchmarks.coverage.table import markdown
from benchmarks.coverage.trial import CHECKS, Row, examine, passed
from benchmarks.coverage.verdicts import group, verdict
from tests.models import thinned
from tests.residual import Residual


class ChoosesByValue(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def ready(kind: type[nn.Module]) -> Ready:
    return Ready(kind(), kind, (torch.randn(2, 6),))


@functools.cache
def examined(kind: type[nn.Module]) -> Row:
    return examine(lambda: ready(kind))


def test_a_model_passes_when_every_check_was_made_and_held() -> None:
    row = examined(Residual)
    assert row["checks"] == dict.fromkeys(CHECKS, "passed")
    assert passed(row)
    assert row["contractions"] == 3
    assert row["macs"] == 6 * 8 + 8 * 8 + 8 * 3
    assert row["blocks"] == {"none": 2, "identity": 1}
    assert row["seconds"].keys() >= {"build", "capture", "rewrite"}


def test_checks_behind_a_failed_one_are_not_reached_and_never_passed() -> None:
    row = examined(ChoosesByValue)
    assert row["failed_at"] == "capture"
    assert "CaptureError" in row["cause"]
    assert row["checks"]["build"] == row["checks"]["forward"] == "passed"
    assert set(list(row["checks"].values())[3:]) == {"not reached"}
    assert not passed(row)


def test_a_model_that_cannot_be_built_says_why() -> None:
    def build() -> Ready:
        raise NotBuiltError("no such size")

    row = examine(build)
    assert row["failed_at"] == "build"
    assert row["cause"] == "no such size"
    assert row["not_built"]


def build_one(case: Case) -> Ready:
    if case.name == "idle":
        time.sleep(60)
    while case.name == "slow":
        pass
    if case.name == "large":
        torch.empty(2**33)
    if case.name == "crash":
        import os

        os._exit(3)
    return ready(Residual)


def rows_of(cases: Sequence[Case]) -> dict[str, Row]:
    return {case.name: row for case, row in run(cases, build_one, Limits(4, 2), jobs=2)}


def test_rows_name_no_folder_of_the_machine() -> None:
    text = "at /home/me/work/benchmarks/coverage/libraries/spiking.py:49, /home/me/.venv/lib/timm/vit.py:3, /tmp/x/m.py"
    assert without_paths(text) == "at benchmarks/coverage/libraries/spiking.py:49, lib/timm/vit.py:3, a folder"
    assert without_paths("in `/home/me/lib/python3.11/random.py`") == "in `random.py`"
    assert without_paths("/home/me/lib/python3.11/site-packages/timm/vit.py") == "timm/vit.py"


@pytest.mark.long
def test_each_model_has_its_process_with_limits(tmp_path: Path) -> None:
    cases = [Case("timm", name, "home") for name in ("good", "slow", "large", "crash")]
    # The sweep starts from a process of its own, as on the command line: autograd's threads do not survive a fork.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        rows = fresh.submit(rows_of, cases).result()
    assert passed(rows["good"])
    assert rows["slow"]["cause"] == "not done after 4 s of processor time"
    assert "memory" in rows["large"]["cause"]
    assert "exit code 3" in rows["crash"]["cause"]
    for name in ("slow", "large", "crash"):
        assert rows[name]["failed_at"] == "build"
        assert rows[name]["checks"].keys() == set(CHECKS)

    for suffix in (".json", ".json.gz"):
        results = Results(tmp_path / f"all{suffix}")
        for case in cases:
            results.add(case, rows[case.name])
    assert json.loads((tmp_path / "all.json").read_text())["models"] == Results(tmp_path / "all.json.gz").rows
    again = Results(tmp_path / "all.json.gz")
    assert not again.open("timm/slow", retry=False)
    assert again.open("timm/slow", retry=True)
    assert not again.open("timm/good", retry=True)
    assert again.open("timm/other", retry=False)
    page = markdown(again)
    assert "| timm |  | 4 | 1 | 1 | 0 | 0 | 0 | 100.0 % |" in page
    assert "| timm | over the sweep's memory or time limit | 3 | crash, large, slow |" in page


def swept(path: Path, suite: Suite, **rows: Row) -> Results:
    made = Results(path)
    for name, row in rows.items():
        made.add(Case(suite, name, ""), row)
    return made


def test_the_page_counts_each_suite_and_names_every_model_that_did_not_pass(tmp_path: Path) -> None:
    good, refused = examined(Residual), examined(ChoosesByValue)
    path = tmp_path / "all.json"
    swept(path, "libraries", good=good, refused=refused)
    page = markdown(swept(path, "hf", passes=good, refused=refused, wrong=good | failure("gates", "no gradient")))
    assert "| libraries |  | 2 | 2 | 1 | 1 | 0 | 0 | 100.0 % |" in page
    assert "| hf |  | 3 | 3 | 1 | 1 | 0 | 1 | 33.3 % |" in page
    assert page.index("### hf") < page.index("| wrong | gates | failed | no gradient |") < page.index("### libraries")
    assert page.count("| refused | capture | refused | CaptureError: ") == 2
    assert "| passes |" not in page
    assert all(f"| {name.replace('_', ' ')} | " in page for name in CHECKS)


def failure(check: str, cause: str, **more: Any) -> Row:
    checks = dict.fromkeys(CHECKS, "passed") | {check: "failed"}
    return {"checks": checks, "failed_at": check, "cause": cause, "verdict": "failed"} | more


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (failure("build", "no such size"), "not built"),
        (failure("gates", "no gradient"), "failed"),
        (failure("rewrite", "KeyError: 'x'", verdict="raw error"), "raw error"),
        (failure("deepcopy", "shared", sizes={"batch 2 to 1": "silently different"}), "silently different"),
        ({**failure("capture", "CaptureError: Net reads values"), "verdict": ""}, "refused"),
        ({**failure("forward", "RuntimeError: no memory"), "verdict": ""}, "raw error"),
    ],
)
def test_a_row_has_one_verdict(row: Row, word: str) -> None:
    row = {name: value for name, value in row.items() if value != ""}  # rows of early sweeps have no verdict
    assert verdict(row) == word


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("Net: NotBuiltError: 11,467,113,472 parameters; Net, Plan(): NotBuiltError: 9,000 parameters", "too large"),
        ("Net: NotBuiltError: 1,269,519,169 parameters; Net, Plan(): ValueError: no groups", "raises ValueError"),
        ("Net: InputError: example inputs for Net cannot be guessed: its forward also needs x", "cannot be guessed"),
        ("Net: ImportError: Net requires the natten library", "not installed"),
        ("not done after 60 s of processor time", "time limit"),
    ],
)
def test_models_that_were_not_built_are_grouped_by_cause(cause: str, words: str) -> None:
    assert words in group(cause)


def test_the_csv_has_a_line_for_each_model(tmp_path: Path) -> None:
    good, refused = examined(Residual), examined(ChoosesByValue)
    path = tmp_path / "all.json.gz"
    write_csv(swept(path, "timm", good=good, refused=refused), beside(path))
    with gzip.open(tmp_path / "all.csv.gz", "rt", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["suite"], first["name"], first["verdict"]) == ("timm", "good", "passed")
    assert int(first["macs"]) == good["macs"]
    assert first["blocks_identity"] == "1"
    assert (second["failed_check"], second["verdict"], second["macs"]) == ("capture", "refused", "")
    assert second["cause"] == without_paths(refused["cause"])


def test_rows_of_parts_of_a_sweep_come_together(tmp_path: Path) -> None:
    row = examined(Residual)
    failed = row | {"checks": row["checks"] | {"gates": "failed"}}
    one, two = Results(tmp_path / "one.json"), Results(tmp_path / "two.json.gz")
    one.add(Case("timm", "first", ""), failed)
    two.add(Case("timm", "first", ""), row)
    two.add(Case("timm", "second", ""), failed)
    two.made_with["timm"] = "0.1"
    two.write()
    one.take(tmp_path / "two.json.gz")
    one.write()
    again = Results(tmp_path / "one.json")
    assert again.made_with["timm"].endswith(" and 0.1")
    assert passed(again.rows["timm/first"])
    assert not passed(again.rows["timm/second"])


def test_parts_of_a_sweep_have_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def record(cases: Sequence[Case], *_: Any) -> list[Any]:
        ran.extend(case.name for case in cases)
        return []

    monkeypatch.setattr(sweep, "run", record)
    for shard in ("1/3", "2/3", "3/3"):
        with contextlib.suppress(KeyError):  # no row comes of it
            sweep.main(["--suite", "libraries", "--out", str(tmp_path / "all.json"), "--shard", shard])
    assert sorted(ran) == sorted(case.name for case in libraries.cases(sample=False))
    with pytest.raises(SystemExit):
        sweep.main(["--suite", "libraries", "--out", str(tmp_path / "all.json"), "--shard", "4/3"])


@pytest.mark.long
def test_a_process_that_stands_still_is_ended() -> None:
    ((_, row),) = run([Case("timm", "idle", "home")], build_one, Limits(1, 2, patience=3), jobs=1)
    assert row["cause"] == "it stands still: not done after 3 s"


def config_of(kind: str) -> type[Any]:
    from transformers import CONFIG_MAPPING

    made: type[Any] = CONFIG_MAPPING[kind]
    return made


def test_a_configuration_is_made_smaller_without_losing_its_proportions() -> None:
    small = shrink(config_of("llama"), PLANS[0])
    assert small.num_hidden_layers == 2
    assert small.hidden_size // small.num_attention_heads == 4096 // 32
    assert small.num_attention_heads % small.num_key_value_heads == 0
    assert small.vocab_size == 1024


def test_special_tokens_stay_inside_the_small_vocabulary_and_apart() -> None:
    small = shrink(config_of("llava"), PLANS[0])
    vocabulary = small.text_config.vocab_size
    assert vocabulary <= 1024
    assert 0 <= small.image_token_id < vocabulary
    assert small.image_token_id != small.text_config.eos_token_id


def test_parts_keep_what_only_they_were_given() -> None:
    assert shrink(config_of("detr"), PLANS[0]).backbone_config.backbone == "resnet50"


@pytest.mark.parametrize("name", ["resnet10t", "test_vit"])
def test_timm_models_are_built_with_drop_rates_and_at_a_small_side(name: str) -> None:
    made = timm_models.build(Case("timm", name, ""))
    assert made.how["drop_rate"] > 0
    assert made.args[0].shape[-1] <= 96


@pytest.mark.parametrize(
    "name",
    thinned(
        ["vit_small_patch16_224", "efficientnet_b0", "regnety_002", "swin_tiny_patch4_window7_224", "mobilenetv5_300m"],
        3,
    ),
)
def test_timm_models_are_cut_and_keep_their_classes(name: str) -> None:
    with torch.device("meta"):
        whole = timm.create_model(name)
    made = timm_models.build(Case("timm", name, ""))
    assert made.how["cut"] == ["depth", "width"]
    assert type(made.model) is type(whole)
    assert {type(m) for m in made.model.modules()} >= {type(m) for m in whole.modules()}
    assert len(list(made.model.modules())) < len(list(whole.modules()))


@pytest.mark.long
def test_only_torchvision_models_too_large_to_run_lose_blocks() -> None:
    large = torchvision_models.build(Case("torchvision", "vit_l_32", "vision_transformer"))
    assert large.how["cut"] == ["depth"]
    assert len(list(large.model.get_submodule("encoder.layers").children())) == 2
    assert "cut" not in torchvision_models.build(Case("torchvision", "regnet_y_400mf", "regnet")).how


def test_the_sample_has_two_of_each_timm_module() -> None:
    cases = timm_models.cases(sample=True)
    groups = [case.group for case in cases]
    assert max(groups.count(group) for group in groups) == 2
    assert set(groups) == {case.group for case in timm_models.cases(sample=False)}


def test_hugging_face_models_come_with_head_labels_and_padding() -> None:
    made = hf_models.build(Case("hf", "bert", "bert"))
    assert "labels" in made.kwargs
    assert (made.kwargs["attention_mask"] == 0).any()


@pytest.mark.slow
def test_a_text_has_as_many_places_as_its_image_has_features() -> None:
    made = hf_models.build(Case("hf", "llava", "llava"))
    assert "pixel_values" in made.kwargs
    row: Row = examine(lambda: made)
    assert passed(row), (row.get("failed_at"), row.get("cause"))
