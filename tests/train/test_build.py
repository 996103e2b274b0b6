"""People's own models and losses: the hooks of `raydz.fit`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raydz.config import load
from raydz.errors import ConfigError
from raydz.models import Decoder, DecoderShape
from raydz.train.build import build_model
from tests.checkpoint.states import assert_same_bits, stored_tensors
from tests.train.runs import column, run, run_config, run_on_rank


class MeanLossModel(nn.Module):
    """Computes its own loss, a mean over the micro-batch's valid labels, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(16, 300)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class LogitsModel(MeanLossModel):
    """The same weights without a loss of its own."""

    def forward(self, input_ids, position_ids=None, document_ids=None):
        return self.head(self.embed(input_ids))


def sum_of_mean(model, batch):
    """The loss hook of a model that returns a mean: a sum again. (A mean over no label at all would be NaN.)"""
    num_valid = (batch["labels"] != -100).sum()
    return model(batch["input_ids"], batch["labels"]) * num_valid


def decoder_from(config):
    """A model function that reads the configuration."""
    return Decoder(
        DecoderShape(
            vocab_size=300, hidden_size=config.model.hidden_size, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, intermediate_size=config.model.intermediate_size,
        )
    )  # fmt: skip


class Sized(LogitsModel):
    """Its class is a model function whose arguments have defaults."""

    def __init__(self, num_extra: int = 2) -> None:
        super().__init__()
        self.extra = nn.Linear(num_extra, 1)


def test_module_that_returns_its_own_mean_trains_like_a_sum(ranks, tmp_path):
    """Micro-batches with different numbers of labels on two ranks: the mean of means would be another number."""
    run(run_config(tmp_path, run={"name": "sum"}), model=LogitsModel)
    hooks = {"model": MeanLossModel, "loss": sum_of_mean}
    ranks(2).run(run_on_rank, run_config(tmp_path, train_micro_batch_size_per_gpu=1), hooks)
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path, "loss", "sum"), abs=1e-5)


def test_model_function_gets_the_configuration_it_asks_for(tmp_path):
    run(run_config(tmp_path, run={"name": "own"}))
    run(run_config(tmp_path), model=decoder_from)
    assert column(tmp_path, "loss") == column(tmp_path, "loss", "own")


def test_arguments_with_defaults_are_left_alone(tmp_path):
    run(run_config(tmp_path, train={"steps": 1}), model=Sized)
    tensors = stored_tensors(tmp_path / "runs/a/checkpoints")
    assert tensors["weight", "extra.weight"].shape == (2,)


class Tabled(nn.Module):
    """Values that no reset_parameters() can make."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(300, 8))
        self.head = nn.Linear(8, 300)

    def forward(self, ids, position_ids=None, document_ids=None):
        return self.head(self.table[ids])


def test_model_that_cannot_be_reset_is_built_for_real_and_equal_on_all_ranks(ranks, tmp_path):
    ranks(2).run(run_on_rank, run_config(tmp_path, zero_optimization={"stage": 3}), {"model": Tabled})
    run(run_config(tmp_path, run={"name": "alone"}), model=Tabled)
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path, "loss", "alone"), abs=1e-5)


def test_initial_values_follow_the_seed(tmp_path):
    states = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        sections = {"run": {"name": name, "seed": seed}, "train": {"steps": 1}}
        run(run_config(tmp_path, optimizer={"params": {"lr": 0.0}}, scheduler=None, **sections))
        states.append(
            {k: v for k, v in stored_tensors(tmp_path / f"runs/{name}/checkpoints").items() if k[0] == "weight"}
        )
    assert_same_bits(states[1], states[0])
    (embedding,) = (key for key in states[0] if "embed" in key[1])
    assert (states[2][embedding] != states[0][embedding]).mean() > 0.9


@pytest.mark.parametrize("result", [None, "model", nn.Linear])
def test_function_that_returns_no_module_is_a_typed_error(tmp_path, result):
    with pytest.raises(ConfigError, match="no module"):
        run(run_config(tmp_path), model=lambda: result)


def test_decoder_is_built_as_the_configuration_says(tmp_path):
    sections = {"activation_checkpointing": "selective", "compile": True, "compile_backend": "aot_eager"}
    config = load(run_config(tmp_path, model=sections, train={"loss_chunk_tokens": 5}))
    model = build_model(config, 300, None)
    block = model.model.layers[0].forward
    assert (block.mode, block.backend) == ("selective", "aot_eager")
    assert model.lm_head.chunk_tokens(torch.float32) == 5
    plain = build_model(load(run_config(tmp_path)), 300, None)
    assert "forward" not in vars(plain.model.layers[0]) and plain.lm_head.chunk_tokens(torch.float32) == 32


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"activation_checkpointing": "selective"}},
        {"parallel": {"activation_checkpointing": "full"}},
        {"train": {"loss_chunk_tokens": 0}},
        {"train": {"loss_chunk_tokens": 7}},
    ],
)
def test_what_is_traded_for_memory_does_not_change_the_losses(ranks, tmp_path, sections):
    wanted = run_config(tmp_path, run={"name": "plain"}, zero_optimization={"stage": 3})
    ranks(2).run(run_on_rank, wanted)
    ranks(2).run(run_on_rank, run_config(tmp_path, zero_optimization={"stage": 3}, **sections))
    exact = "loss_chunk_tokens" not in sections.get("train", {})
    tolerance = 0 if exact else 1e-5
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path, "loss", "plain"), abs=tolerance, rel=0)


def test_attention_kernel_is_said_at_the_start(tmp_path, caplog):
    with caplog.at_level("INFO", "raydz"):
        run(run_config(tmp_path, train={"steps": 1}))
    assert "attention kernel: flash (cpu)" in caplog.text
