"""Frozen weights as codes on two processes: DistributedDataParallel and fully_shard give the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx import Engine, FracModel
from fractrain_fx.distributed import fully_shard
from fractrain_fx.errors import ModelError
from tests.model.frozen.packed import BATCH, PFQ, packed, rewritten
from tests.sharded import together

pytestmark = pytest.mark.long

RANKS = 2


def train(model: nn.Module, rank: int) -> list[float]:
    engine, losses = Engine(model), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(rank)
    mine = {name: x[2 * rank : 2 * rank + 2] for name, x in BATCH.items()}
    for _ in range(4):
        loss = model(**mine).loss
        engine.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(model: FracModel) -> int:
    """Bytes of codes that this process holds."""
    codes = (p for name, p in model.named_parameters() if name.endswith(".frozen.codes"))
    return sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in codes)


def _run(rank: int, folder: str, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    data_parallel = packed(PFQ)
    if rank:  # every process starts from the codes of the first
        for name, p in data_parallel.named_parameters():
            if name.endswith(".frozen.codes"):
                p.data.zero_()
    found["whole"] = held(data_parallel)
    found["ddp"] = train(DistributedDataParallel(data_parallel), rank)
    sharded = packed(PFQ)
    if rank:
        for p in sharded.parameters():
            p.data.zero_()
    sharded.gradient_checkpointing_enable()
    fully_shard(sharded)
    found["fsdp"], found["share"] = train(sharded, rank), held(sharded)
    with pytest.raises(ModelError, match=r"pack_frozen\(\) before fully_shard"):
        fully_shard(rewritten(PFQ)).pack_frozen()
    dcp.save(get_model_state_dict(sharded), checkpoint_id=f"{folder}/dcp")
    sharded.save_pretrained(f"{folder}/saved")
    alone = packed(PFQ)
    values = alone.state_dict()
    dcp.load(values, checkpoint_id=f"{folder}/dcp")
    alone.load_state_dict(values)
    with torch.no_grad():
        found["loaded"] = [each.eval()(**BATCH).loss.item() for each in (sharded, alone)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_codes_are_shared_once_or_sharded(tmp_path: Path) -> None:
    if torch.__version__.startswith("2.11."):
        with pytest.raises(Exception, match=r"ModelError: torch 2\.11.* shards no integers.*newer torch"):
            together(_run, tmp_path, RANKS)
        return
    together(_run, tmp_path, RANKS)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["fsdp"] == pytest.approx(found["ddp"], abs=1e-5)
        assert found["share"] == found["whole"] / RANKS
        assert found["loaded"][0] == pytest.approx(found["loaded"][1], abs=1e-6)
