"""What was made of a tensor is found again for that tensor only, and only as long as it holds."""

from __future__ import annotations

from threading import Thread

import torch

from fractrain_fx.formats.scratch import Latest, forget_results


def test_a_result_is_found_for_the_same_tensor_made_in_the_same_way() -> None:
    latest, x = Latest(), torch.ones(3)
    assert latest.of(x, "how") is None
    latest.keep(x, "how", 5)
    assert latest.of(x, "how") == 5
    assert latest.of(x, "other") is None and latest.of(x.clone(), "how") is None
    latest.drop()
    assert latest.of(x, "how") is None


def test_a_write_or_another_tensor_in_its_place_ends_it() -> None:
    latest, x = Latest(), torch.ones(3)
    latest.keep(x, "how", 5)
    x[:1].add_(1)  # through a view
    assert latest.of(x, "how") is None
    latest.keep(x, "how", 5)
    place = x.data_ptr()
    del x
    again = [torch.ones(3) for _ in range(20)]
    assert all(latest.of(each, "how") is None for each in again), f"some of them may lie at {place}"


def test_a_call_of_a_model_ends_it_from_another_thread_too() -> None:
    latest, x = Latest(), torch.ones(3)
    latest.keep(x, "how", 5)
    call = Thread(target=forget_results)
    call.start()
    call.join()
    assert latest.of(x, "how") is None


def test_a_tensor_without_values_on_the_host_has_results() -> None:
    latest, x = Latest(), torch.ones(3, device="meta")
    latest.keep(x, "how", 5)
    assert latest.of(x, "how") == 5


def test_nothing_is_kept_where_writes_leave_no_trace() -> None:
    latest = Latest()
    with torch.inference_mode():
        x = torch.ones(3)
        latest.keep(x, "how", 5)
        assert latest.of(x, "how") is None
