"""Which parameters are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raydz.errors import ConfigError
from raydz.zero import find_units
from tests.zero.models import Block, Plain, ScaledEmbedding, TiedWithBias


def names(model: nn.Module, patterns=None) -> dict[str, list[str]]:
    return {unit.name: [spec.name for spec in unit.parameters] for unit in find_units(model, patterns)}


BLOCK_PARAMETERS = ("up.weight", "up.bias", "down.weight")


def of_block(name: str) -> list[str]:
    return [f"{name}.{parameter}" for parameter in BLOCK_PARAMETERS]


def test_blocks_untied_embedding_and_head_are_units_and_the_rest_is_the_root() -> None:
    assert names(Plain()) == {
        "": ["norm.weight", "norm.bias"],
        "embed": ["embed.weight"],
        "layers.0": of_block("layers.0"),
        "layers.1": of_block("layers.1"),
        "head": ["head.weight"],
    }


def test_a_tied_embedding_belongs_to_the_root_once_with_its_other_name() -> None:
    units = find_units(Plain(tied=True))
    assert [unit.name for unit in units] == ["", "layers.0", "layers.1"]
    spec = units[0].parameters[0]
    assert (spec.name, spec.aliases) == ("embed.weight", ["head.weight"])
    assert names(TiedWithBias())["head"] == ["head.bias"]


def test_a_parameter_of_two_blocks_goes_to_their_lowest_common_ancestor() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Plain())
    inner = model[1]
    inner.layers[1].up.weight = inner.layers[0].up.weight
    found = names(model, ["1", "1.layers.[01]"])
    assert "1.layers.0.up.weight" in found["1"]
    assert found["1.layers.0"] == ["1.layers.0.up.bias", "1.layers.0.down.weight"]
    assert found[""] == ["0.weight", "0.bias"]


def test_a_parameter_shared_within_a_unit_stays_there() -> None:
    model = Plain()
    model.layers[0].extra = nn.Linear(6, 10)
    model.layers[0].extra.weight = model.layers[0].up.weight
    assert "layers.0.up.weight" in names(model)["layers.0"]


def test_a_block_registered_twice_is_one_unit() -> None:
    model, block = Plain(), Block()
    model.layers = nn.ModuleList([block, Block(), block])
    found = names(model)
    assert sorted(found) == ["", "embed", "head", "layers.0", "layers.1"]
    units = {unit.name: unit for unit in find_units(model)}
    assert units["layers.0"].parameters[0].aliases == ["layers.2.up.weight"]


def test_a_block_registered_under_two_parents_is_one_unit() -> None:
    model = Plain()
    model.copy = model.layers[1]
    assert names(model)["layers.1"] == of_block("layers.1")


def test_lists_within_blocks_are_part_of_the_block() -> None:
    model = Plain()
    model.layers[0].experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 7)])
    found = names(model)
    assert "layers.0.experts.0.weight" in found["layers.0"]
    assert not any("experts" in name for name in found)


def test_patterns_replace_the_automatic_choice() -> None:
    assert names(Plain(), ["layers.1"]) == {
        "": ["embed.weight", *of_block("layers.0"), "norm.weight", "norm.bias", "head.weight"],
        "layers.1": of_block("layers.1"),
    }
    assert list(names(Plain(), ["layers.?", "head"])) == ["", "layers.0", "layers.1", "head"]


@pytest.mark.parametrize("pattern", ["layers.7", "transformer.h.*", "dropout"])
def test_a_pattern_that_matches_no_parameters_is_refused_with_examples(pattern: str) -> None:
    model = Plain()
    model.dropout = nn.Dropout()
    with pytest.raises(ConfigError) as caught:
        find_units(model, ["head", pattern])
    assert pattern in str(caught.value) and "parallel.units" in str(caught.value)
    assert "embed" in caught.value.remedy


def test_a_container_whose_forward_never_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="never called") as caught:
        find_units(Plain(), ["layers"])
    assert "layers (ModuleList)" in str(caught.value) and "layers.0" in caught.value.remedy
    assert "layers.0" in names(Plain(), ["layers", "layers.[01]"])  # nothing is left for the list itself


def test_a_model_without_blocks_is_its_root() -> None:
    assert names(nn.Linear(3, 2)) == {"": ["weight", "bias"]}
    assert names(nn.Embedding(3, 2)) == {"": ["weight"]}
    assert names(nn.Identity()) == {"": []}


def test_parameters_keep_module_order_and_each_is_in_one_unit() -> None:
    model = Plain(3, tied=True)
    listed = [spec for unit in find_units(model) for spec in unit.parameters]
    assert sorted(spec.name for spec in listed) == sorted(name for name, _ in model.named_parameters())
    assert len({id(spec.parameter) for spec in listed}) == len(listed)


def test_replace_puts_a_parameter_in_every_place() -> None:
    model = Plain(tied=True)
    spec = find_units(model)[0].parameters[0]
    fresh = nn.Parameter(torch.zeros(7, 6))
    spec.replace(fresh)
    assert model.embed.weight is fresh and model.head.weight is fresh


def test_only_an_embedding_that_does_nothing_else_is_a_lookup() -> None:
    class Renamed(nn.Embedding):
        pass

    def is_lookup(module: nn.Module) -> bool:
        return find_units(nn.ModuleDict({"m": module}), ["m"])[1].is_lookup

    assert is_lookup(nn.Embedding(7, 6)) and is_lookup(Renamed(7, 6))
    assert not is_lookup(ScaledEmbedding()) and not is_lookup(nn.Linear(6, 7))
    assert not is_lookup(nn.utils.parametrizations.weight_norm(nn.Embedding(7, 6)))
