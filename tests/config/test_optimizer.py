"""`optimizer`: types by DeepSpeed's and torch's names, with the parameters and defaults of each."""

from __future__ import annotations

import inspect

import pytest
import torch

from raydz.config import load_engine
from raydz.errors import ConfigError
from raydz.optim import build_optimizer

TORCH = ["SGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "AdamW"]


def optimizer(kind: str | None = None, **params):
    section = {"params": params} | ({} if kind is None else {"type": kind})
    return load_engine({"optimizer": section}).optimizer


@pytest.mark.parametrize("kind", TORCH)
def test_defaults_are_torchs_where_both_have_the_parameter(kind: str):
    theirs = {name: p.default for name, p in inspect.signature(getattr(torch.optim, kind)).parameters.items()}
    ours = optimizer(kind).params.model_dump()
    ours.pop("adam_w_mode", None), ours.pop("bias_correction", None)
    assert kind != "AdamW" or ours.pop("weight_decay") == 0.0  # DeepSpeed's
    assert {name: theirs[name] for name in ours} == ours


def test_defaults_of_deepspeeds_own():
    muon, lion = optimizer("Muon").params, optimizer("Lion").params
    assert (muon.lr, muon.momentum, muon.weight_decay, muon.ns_method) == (1e-3, 0.95, 0.0, "gram")
    assert (muon.muon_lr, muon.adam_lr, lion.lr, lion.betas) == (None, None, 1e-3, (0.9, 0.99))


@pytest.mark.parametrize("kind", [*TORCH, "Adam", "Lion", "Muon"])
def test_every_type_can_be_built_in_any_case_of_letters(kind: str):
    section = optimizer(kind.lower(), lr=0.5)
    assert section.type == kind
    built = build_optimizer(section.type, threads=1, **section.params.model_dump())
    assert built.lr == 0.5


def test_without_a_type_it_is_adamw():
    assert optimizer(lr=0.5).type == "AdamW" and load_engine({}).optimizer.type == "AdamW"
    assert optimizer(bias_correction=False).params.bias_correction is False
    assert build_optimizer("AdamW", bias_correction=False).bias_correction is False


@pytest.mark.parametrize(
    ("kind", "params", "where"),
    [
        ("SGD", {"betas": [0.9, 0.9]}, "optimizer.params.betas"),
        ("AdamW", {"momentum": 0.9}, "optimizer.params.momentum"),
        ("Lion", {"lr": -1.0}, "optimizer.params.lr"),
        ("Muon", {"ns_method": "cubic"}, "optimizer.params.ns_method"),
        ("NAdam", {"eps": "x"}, "optimizer.params.eps"),
        ("Nonsense", {}, "optimizer.type"),
    ],
)
def test_what_a_type_does_not_have_is_refused_by_path(kind: str, params: dict, where: str):
    with pytest.raises(ConfigError) as caught:
        optimizer(kind, **params)
    assert caught.value.where.split(" ")[0] == where


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("Adafactor", "rows and columns"), ("LBFGS", "again"), ("ASGD", "step before"), ("Rprop", "whole data set"),
     ("SparseAdam", "dense"), ("Lamb", "later release"), ("OneBitAdam", "later release")],
)  # fmt: skip
def test_what_is_not_elementwise_or_not_there_is_refused_with_the_reason(kind: str, reason: str):
    with pytest.raises(ConfigError) as caught:
        optimizer(kind, lr=0.1)
    assert caught.value.where.startswith("optimizer.type") and reason in str(caught.value.remedy)
