"""Settings of parameters from the optimizer, its groups and the module tree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raydz.errors import ConfigError
from raydz.optim import build_optimizer
from raydz.zero.settings import ParameterSettings, plan_settings
from tests.zero.models import Plain

ADAMW = build_optimizer("AdamW", lr=0.1, weight_decay=0.2)
MUON = build_optimizer("Muon", lr=0.1, weight_decay=0.2, muon_lr=0.3)
MATRICES = {f"layers.{i}.{part}.weight" for i in range(2) for part in ("up", "down")}


def matrices(model: nn.Module, groups=None) -> set[str]:
    return {name for name, settings in plan_settings(model, MUON, groups).items() if settings.is_matrix}


def test_vectors_do_not_decay() -> None:
    settings = plan_settings(Plain(), ADAMW)
    assert settings["layers.0.up.weight"] == ParameterSettings(0.2)
    assert settings["layers.0.up.bias"] == settings["norm.weight"] == ParameterSettings(0.0)


def test_groups_set_rates_in_proportion_and_decays_for_all_their_members() -> None:
    model = Plain()
    ends = [model.embed.weight, *model.norm.parameters()]
    rest = [p for p in model.parameters() if all(p is not end for end in ends)]
    settings = plan_settings(model, ADAMW, [{"params": ends, "lr": 0.05, "weight_decay": 0.7}, {"params": rest}])
    assert settings["norm.bias"] == settings["embed.weight"] == ParameterSettings(0.7, 0.5)
    assert settings["head.weight"] == ParameterSettings(0.2) and settings["layers.0.up.bias"] == ParameterSettings(0.0)


@pytest.mark.parametrize("form", ["parameters", "named", "one group"])
def test_parameters_without_settings_are_as_none(form: str) -> None:
    model = Plain()
    given = {
        "parameters": model.parameters(),
        "named": [{"params": model.named_parameters()}],
        "one group": [{"params": model.parameters(), "name": "all"}],
    }[form]
    assert plan_settings(model, ADAMW, given) == plan_settings(model, ADAMW)


def test_muon_takes_matrices_inside_blocks() -> None:
    assert matrices(Plain()) == MATRICES
    assert plan_settings(Plain(), MUON)["layers.0.up.weight"].lr_scale == pytest.approx(3.0)
    assert plan_settings(Plain(), MUON)["head.weight"].lr_scale == 1.0


def test_tables_and_shared_matrices_are_not_a_blocks_own() -> None:
    model = Plain()
    model.layers[0].table = nn.Embedding(3, 4)
    model.layers[1].up.weight = model.head.weight  # also outside a block
    assert matrices(model) == MATRICES - {"layers.1.up.weight"}


def test_the_caller_may_choose_matrices() -> None:
    model = Plain()
    model.head.weight.use_muon = True
    model.layers[0].up.weight.use_muon = False
    assert matrices(model) == (MATRICES | {"head.weight"}) - {"layers.0.up.weight"}
    rest = [p for p in model.parameters() if p is not model.embed.weight]
    groups = [{"params": [model.embed.weight], "use_muon": True, "lr": 0.2}, {"params": rest, "use_muon": False}]
    assert matrices(model, groups) == {"embed.weight"}
    assert plan_settings(model, MUON, groups)["embed.weight"].lr_scale == pytest.approx(2.0)


def faulty(kind: str):
    model = Plain()
    everything = list(model.parameters())
    return model, {
        "forgotten": [{"params": everything[1:]}],
        "twice": [{"params": everything}, {"params": everything[:1]}],
        "foreign": [{"params": everything}, {"params": [nn.Parameter(torch.zeros(2))]}],
        "keys": [{"params": everything, "betas": (0.9, 0.9)}],
        "no parameter": [{"params": [torch.zeros(2)]}],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "says"),
    [("forgotten", "embed.weight"), ("twice", "in two groups"), ("foreign", "not the model's"), ("keys", "betas"),
     ("no parameter", "no parameter")],
)  # fmt: skip
def test_groups_that_do_not_fit_are_refused(kind: str, says: str) -> None:
    model, groups = faulty(kind)
    with pytest.raises(ConfigError, match=says):
        plan_settings(model, ADAMW, groups)


def test_a_frozen_parameter_needs_no_group() -> None:
    model = Plain()
    model.embed.weight.requires_grad_(False)
    assert plan_settings(model, ADAMW, [{"params": [p for p in model.parameters() if p.requires_grad]}])


def test_muon_without_a_matrix_and_on_a_vector_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_muon"):
        plan_settings(nn.Sequential(nn.Linear(2, 3)), MUON)
    model = Plain()
    model.norm.weight.use_muon = True
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        plan_settings(model, MUON)


def test_a_rate_in_proportion_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr"):
        model = Plain()
        plan_settings(model, build_optimizer("SGD", lr=0.0), [{"params": model.parameters(), "lr": 0.1}])
