"""The benchmark of the step itself: order and ratios, what counts as saved, names of methods, tables and files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.page import markdown_table, write_section
from benchmarks.records import Quartiles, command, quartiles, ratios
from benchmarks.step.__main__ import main as run_benchmark
from benchmarks.step.measure import interleaved, saved_bytes, waits_among
from benchmarks.step.methods import Method, Step, default_methods, parse, prepare, spread_choices
from benchmarks.step.peers import NotAvailableError, quantized
from benchmarks.step.results import Row, Run, load, save
from benchmarks.step.subjects import SUBJECTS, Subject
from benchmarks.step.table import markdown, not_run
from tests.build import paper, rewritten
from tests.residual import Residual


def step_of(forward: Callable[[], Tensor], *parameters: nn.Parameter) -> Step:
    return Step(forward, parameters, contextlib.nullcontext)


def test_every_round_has_every_method_once_in_changing_order() -> None:
    seen: list[str] = []
    steps = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    times = interleaved(steps, 8, "cpu")
    rounds = [seen[start : start + 3] for start in range(0, 24, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert {len(each) for each in times.values()} == {8}


def test_ratios_are_taken_inside_a_round() -> None:
    times = {"float": [1.0, 10.0, 2.0], "pfq": [1.5, 15.0, 3.0]}
    assert ratios(times, "pfq", "float") == Quartiles(1.5, 1.5, 1.5)
    assert quartiles([5.0]) == Quartiles(5.0, 5.0, 5.0)
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == Quartiles(3.0, 2.0, 4.0)


def test_a_clock_measures_the_step_and_nothing_between() -> None:
    times = interleaved({"sleep": lambda: time.sleep(0.02), "none": lambda: None}, 2, "cpu")
    assert min(times["sleep"]) >= 0.02 > max(times["none"])


def test_saved_memory_counts_each_storage_once_and_whole_and_no_parameters() -> None:
    weight = nn.Parameter(torch.randn(10, 10))
    x = torch.randn(7, 10)
    # Linear saves x and the weight; the product of h with its half saves both views of one storage.
    assert saved_bytes(step_of(lambda: (x @ weight).sum(), weight)) == x.nbytes

    def twice() -> Tensor:
        h = x @ weight
        return (h[:, :5] * h[:, 5:]).sum()

    assert saved_bytes(step_of(twice, weight)) == 2 * x.nbytes
    assert saved_bytes(step_of(lambda: (x @ weight).exp().sum(), weight)) == 2 * x.nbytes


def test_saved_memory_sees_what_quantizers_keep() -> None:
    model, x, y = Residual(), torch.randn(4, 6), torch.randn(4, 3)
    loss = nn.functional.mse_loss
    kept = {name: saved_bytes(prepare(parse(name), model, x, y, loss)) for name in ("float", "pfq", "dfq")}
    assert kept["float"] > 0 and kept["dfq"] > kept["float"]


def test_methods_are_named_by_base_and_modes() -> None:
    assert parse("dfq+compiled+bf16") == Method("dfq", frozenset({"bf16", "compiled"}))
    assert str(parse("dfq+compiled+bf16")) == "dfq+bf16+compiled"
    assert parse("dfq+compiled").alike == parse("float+compiled")
    assert parse("dfq+kernels").alike == Method("float"), "float rounds nothing"
    for wrong in ("dqf", "dfq+fp4"):
        with pytest.raises(ValueError, match="unknown"):
            parse(wrong)
    for wrong in ("float+kernels", "brevitas+kernels"):
        with pytest.raises(ValueError, match="for the rewritten ones"):
            parse(wrong)
    assert parse("dfq+segments").alike == Method("float")
    assert parse("pfq+graphs").alike == parse("float+graphs")
    for wrong in ("dfq+segments+compiled", "dfq+segments+graphs", "dfq+compiled+graphs"):
        with pytest.raises(ValueError, match="compile the whole model"):
            parse(wrong)
    for wrong in ("pfq+kernels+compiled", "pfq+kernels+graphs", "dfq+kernels+auto+compiled"):
        with pytest.raises(ValueError, match="changes no compiled step"):
            parse(wrong)
    for name in ("dfq+kernels+int8+compiled", "dfq+kernels+compiled", "mxfp4+kernels+compiled"):
        assert parse(name).alike == parse("float+compiled")
    for device in ("cpu", "cuda"):
        methods = default_methods(device)
        assert methods[0] == Method("float") and len(set(methods)) == len(methods)


@pytest.mark.parametrize("name", ["float", "static", "pfq", "dfq", "dfq5", "pfq+kernels", "float+bf16", "dfq+bf16"])
def test_a_step_gives_every_parameter_a_gradient_and_takes_it_back(name: str) -> None:
    model, x, y = Residual(), torch.randn(4, 6), torch.randn(4, 3)
    step = prepare(parse(name), model, x, y, nn.functional.mse_loss)
    step.forward().backward()
    assert all(parameter.grad is not None for parameter in step.parameters)
    step.run()
    assert all(parameter.grad is None for parameter in step.parameters)
    assert all(parameter.grad is None for parameter in model.parameters()), "the model itself is not trained"


@pytest.mark.parametrize("batch", [7, 14])
def test_the_samples_of_a_batch_choose_all_options_equally_often(batch: int) -> None:
    x = torch.randn(batch, 6)
    model = rewritten(Residual(), x, config=paper("dfq"))
    spread_choices(model, batch)
    model(x)
    for choice in model.cost.choice.values():
        assert choice.shape[1] < 7 or choice.detach().argmax(1).bincount(minlength=7).tolist() == [batch // 7] * 7


def test_a_peer_that_is_missing_or_quantizes_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    with monkeypatch.context() as missing:
        missing.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(NotAvailableError, match="not installed"):
            quantized("brevitas", Residual(), torch.randn(4, 6))
    if importlib.util.find_spec("torchao") is not None:
        images = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3)))
        with pytest.raises(NotAvailableError, match="linear layers only"):
            quantized("torchao", images, torch.randn(2, 3, 4, 4))


def test_only_waiting_inside_the_step_counts() -> None:
    events = [
        ("measured step", 10.0, 20.0),
        ("cudaStreamSynchronize", 12.0, 13.0),
        ("cudaStreamSynchronize", 19.0, 25.0),
        ("Memcpy DtoH (Device -> Pageable)", 13.0, 14.0),
        ("cudaDeviceSynchronize", 21.0, 22.0),
        ("aten::add", 11.0, 12.0),
    ]
    assert waits_among(events, "measured step") == {"cudaStreamSynchronize": 2, "Memcpy DtoH": 1}


def a_run(model: str, note: str = "") -> Run:
    rows = [Row("float", Quartiles(2.0, 1.0, 3.0), Quartiles(1.0, 1.0, 1.0), saved=10**6, saved_ratio=1.0, first=0.5)]
    rows.append(Row("pfq", Quartiles(3.0, 2.0, 4.0), Quartiles(1.5, 1.4, 1.6), saved=2 * 10**6, saved_ratio=2.0))
    rows.append(Row("brevitas", note="it is not installed"))
    return Run(model, f"Title of {model}", "cpu", 4, 3, "python -m benchmarks.step", {"threads": "2"}, rows)


def test_a_file_keeps_the_newest_run_of_each_model(tmp_path: Path) -> None:
    path = tmp_path / "new" / "all.json"
    save(path, a_run("a"))
    save(path, a_run("b"))
    newer = Run(**(a_run("a").__dict__ | {"rounds": 9}))
    assert save(path, newer) == load(path) == {"a/cpu": newer, "b/cpu": a_run("b")}


def test_the_page_has_every_number_and_the_reason_for_every_missing_one() -> None:
    text = markdown([a_run("a")])
    assert "| pfq | 3.0 (2.0-4.0) | 1.50 (1.40-1.60) |  | 2.0 | 2.00 |  |" in text
    assert "Not run: brevitas (it is not installed)." in text
    assert "`python -m benchmarks.step`, 3 rounds; threads 2." in text
    assert not_run(a_run("a")) == ["brevitas (it is not installed)"]


def test_a_section_of_a_page_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_section(page, "x", "one")
    page.write_text(f"before\n{page.read_text()}after\n")
    write_section(page, "x", r"two \1")
    assert page.read_text() == "before\n<!-- x -->\n\ntwo \\1\n\n<!-- /x -->\nafter\n"
    with pytest.raises(ValueError, match="<!-- y -->"):
        write_section(page, "y", "three")
    assert markdown_table(["a", "b"], [["1|2", "3"]]) == "| a | b |\n| --- | ---: |\n| 1\\|2 | 3 |"


def test_the_command_is_kept_without_the_places_it_wrote_to() -> None:
    argv = ["--json", "/secret/a.json", "--models", "resnet38", "--table=/secret/b.md", "--rounds", "3"]
    assert command("benchmarks.step", argv) == "python -m benchmarks.step --models resnet38 --rounds 3"


def test_the_whole_command_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Subject(
        "a small residual network",
        Residual,
        {"cpu": 4},
        lambda batch: (torch.randn(batch, 6), torch.randn(batch, 3)),
        nn.functional.mse_loss,
    )
    monkeypatch.setitem(SUBJECTS, "resnet38", tiny)
    json, page = tmp_path / "all.json", tmp_path / "page.md"
    argv = [
        "--models",
        "resnet38",
        "--methods",
        "pfq",
        "dfq",
        "--rounds",
        "2",
        "--json",
        str(json),
        "--table",
        str(page),
    ]
    run_benchmark(argv)
    (run,) = load(json).values()
    assert [row.method for row in run.rows] == ["float", "pfq", "dfq"]
    assert run.rows[0].ratio == Quartiles(1.0, 1.0, 1.0) and run.rows[0].saved_ratio == 1.0
    assert all(row.ms and row.ms.median > 0 and row.saved for row in run.rows)
    assert "| dfq |" in page.read_text()
