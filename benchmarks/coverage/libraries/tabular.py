"""Tables with numbers and categories, and click-through rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.libraries.entry import Entry, Module

__all__ = ["ENTRIES"]

_ctr = Module("deepctr_torch.models")
_ctr_inputs = Module("deepctr_torch.inputs")
_rtdl = Module("rtdl_revisiting_models")
_tab = Module("tab_transformer_pytorch")
_tabnet = Module("pytorch_tabnet.tab_network")

_ROWS, _NUMBERS, _KINDS = 8, 6, (5, 7, 3)


def _numbers() -> Tensor:
    return torch.randn(_ROWS, _NUMBERS)


def _categories() -> Tensor:
    return torch.stack([torch.randint(0, n, (_ROWS,)) for n in _KINDS], dim=1)


def _columns() -> list[Any]:
    sparse = [_ctr_inputs.SparseFeat(f"c{i}", n, embedding_dim=8) for i, n in enumerate(_KINDS)]
    return sparse + [_ctr_inputs.DenseFeat(f"n{i}", 1) for i in range(_NUMBERS)]


def _click(name: str, *columns: str, **options: Any) -> Entry:
    arguments = columns or ("linear_feature_columns", "dnn_feature_columns")

    def make() -> Any:
        given = {argument: _columns() for argument in arguments}
        return getattr(_ctr, name)(**given, dnn_hidden_units=(32, 16), **options)

    return Entry("deepctr-torch", name, make, lambda: (torch.cat([_categories().float(), _numbers()], dim=1),))


ENTRIES = (
    Entry(
        "rtdl_revisiting_models",
        "MLP",
        lambda: _rtdl.MLP(d_in=_NUMBERS, d_out=1, n_blocks=2, d_block=32, dropout=0.1),
        lambda: (_numbers(),),
    ),
    Entry(
        "rtdl_revisiting_models",
        "ResNet",
        lambda: _rtdl.ResNet(
            d_in=_NUMBERS, d_out=1, n_blocks=2, d_block=32, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0
        ),
        lambda: (_numbers(),),
    ),
    Entry(
        "rtdl_revisiting_models",
        "FTTransformer",
        lambda: _rtdl.FTTransformer(
            n_cont_features=_NUMBERS,
            cat_cardinalities=list(_KINDS),
            d_out=1,
            n_blocks=2,
            d_block=32,
            attention_n_heads=2,
            attention_dropout=0.1,
            ffn_d_hidden=64,
            ffn_d_hidden_multiplier=None,
            ffn_dropout=0.1,
            residual_dropout=0.0,
        ),
        lambda: (_numbers(), _categories()),
    ),
    Entry(
        "tab-transformer-pytorch",
        "TabTransformer",
        lambda: _tab.TabTransformer(
            categories=_KINDS, num_continuous=_NUMBERS, dim=16, depth=2, heads=2, mlp_act=nn.ReLU()
        ),
        lambda: (_categories(), _numbers()),
    ),
    Entry(
        "tab-transformer-pytorch",
        "FTTransformer",
        lambda: _tab.FTTransformer(categories=_KINDS, num_continuous=_NUMBERS, dim=16, depth=2, heads=2),
        lambda: (_categories(), _numbers()),
    ),
    Entry(
        "pytorch-tabnet",
        "TabNet",
        lambda: _tabnet.TabNet(
            _NUMBERS, 2, n_steps=2, virtual_batch_size=4, group_attention_matrix=torch.eye(_NUMBERS)
        ),
        lambda: (_numbers(),),
    ),
    _click("DeepFM"),
    _click("WDL"),
    _click("DCN"),
    _click("xDeepFM"),
    _click("AutoInt"),
)
