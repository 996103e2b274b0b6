"""A model with the habits of Hugging Face's transformers, written down here, trained as it comes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydz.errors import ConfigError
from raydz.zero.initialize import unresettable_modules
from tests.zero.models import INNER, VOCABULARY, WIDTH
from tests.zero.training import (
    Batch,
    Run,
    assert_close,
    assert_equal_bits,
    build,
    numpy_weights,
    start,
    train_step,
    train_with_engine,
    train_with_torch,
)  # fmt: skip


@dataclasses.dataclass
class CausalOutput(OrderedDict):
    """`ModelOutput`: a dataclass that is a mapping of those of its fields that are not None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple | None = None

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                super().__setitem__(entry.name, value)

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


class Norm(nn.Module):
    """`LlamaRMSNorm`: no reset_parameters, and fp32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)


class Rotary(nn.Module):
    """A table that is not saved, made in the constructor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10 ** (torch.arange(WIDTH) / WIDTH), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.sin(position_ids[..., None].float() * self.inv_freq.float())


class Layer(nn.Module):
    """Keyword arguments only, and a tuple back."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.up, self.down = Norm(), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, *, hidden_states: Tensor, position_embeddings: Tensor | None = None) -> tuple[Tensor, None]:
        x = self.input_norm(hidden_states) + position_embeddings.to(hidden_states.dtype)
        return hidden_states + self.down(F.silu(self.up(x))), None


class Body(nn.Module):
    def __init__(self, has_table: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = Norm()
        self.rotary = Rotary() if has_table else None

    def forward(self, *, input_ids: Tensor, output_hidden_states: bool = False) -> CausalOutput:
        x, seen = self.embed_tokens(input_ids), []
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        table = self.rotary(position_ids) if self.rotary else torch.sin(position_ids[..., None].float())
        for layer in self.layers:
            seen.append(x)
            x = layer(hidden_states=x, position_embeddings=table)[0]
        return CausalOutput(logits=self.norm(x), hidden_states=tuple(seen) if output_hidden_states else None)


class CausalModel(nn.Module):
    """`...ForCausalLM` with tied embeddings; `_init_weights` knows every module that holds parameters."""

    initializer_range = 0.5

    def __init__(self, *, is_tied: bool = True, has_table: bool = True) -> None:
        super().__init__()
        self.model = Body(has_table)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules() if not self.lm_head.weight.is_meta else ():
            self._init_weights(module)
        if is_tied:
            self.get_output_embeddings().weight = self.get_input_embeddings().weight

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.initializer_range)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
        elif isinstance(module, Norm):
            module.weight.data.fill_(1.0)

    def forward(self, *, input_ids: Tensor, labels: Tensor | None = None, **kwargs) -> CausalOutput:
        out = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(out.logits)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return CausalOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


def own_loss(model, batch: Batch, rank: int, step: int) -> Tensor:
    out = model(input_ids=batch["ids"], labels=batch["labels"], output_hidden_states=True)
    assert type(out) is CausalOutput and out["loss"] is out.loss is out[0] and len(out.hidden_states) == 2
    return out.loss


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_it_trains_as_plain_torch_trains_it(ranks, stage: int, world: int, is_tied: bool) -> None:
    run = Run(partial(CausalModel, is_tied=is_tied), own_loss, stage=stage)
    outcome = ranks(world).run(train_with_engine, run)[0]
    table = outcome.weights.pop("model.rotary.inv_freq")
    assert table.tobytes() == Rotary().inv_freq.numpy().tobytes()
    assert_close(outcome, train_with_torch(run, world))


def exceptional(rank: int, world_size: int, stage: int) -> tuple[str, str]:
    run = Run(CausalModel, own_loss, stage=stage)
    sections = {"bf16": {"enabled": True}, "parallel": {"fp32_modules": ["*norm", "model.layers.1"]}}
    engine, seen = start(run, **sections), []
    engine.module.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out[0].dtype))
    engine.module.model.layers[1].up.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    report = None
    for step in (1, 2, 3):
        _, report = train_step(engine, run, rank, world_size, step)
    assert report is not None and not report.skipped
    dtypes = [str(dtype) for dtype in seen[:2]]
    engine.destroy()
    return dtypes[0], dtypes[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_exceptions_reach_keyword_arguments_and_tuples(ranks, stage: int) -> None:
    assert ranks(2).run(exceptional, stage) == [("torch.float32", "torch.bfloat16")] * 2


def born_on_meta(rank: int, world_size: int, run: Run) -> dict[str, np.ndarray]:
    engine = start(run)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


def test_one_born_on_meta_is_initialised_by_its_own_rule_whatever_the_world(ranks) -> None:
    run = Run(partial(CausalModel, has_table=False), own_loss, stage=3, is_meta=True)
    alone = ranks(1).run(born_on_meta, run)[0]
    assert_equal_bits(ranks(2).run(born_on_meta, run.with_(stage=1))[0], alone)
    assert_equal_bits(ranks(3).run(born_on_meta, run)[0], alone)
    assert np.array_equal(alone["model.norm.weight"], np.ones(WIDTH))
    assert not alone["model.layers.0.up.bias"].any()
    # torch's own reset draws from a uniform of at most 1/sqrt(6) = 0.41; the rule's normal of 0.5 exceeds that
    assert abs(alone["model.layers.0.up.weight"]).max() > 0.6


def test_a_table_that_only_the_constructor_makes_is_refused_by_name() -> None:
    run = Run(CausalModel, own_loss, is_meta=True)
    with pytest.raises(ConfigError, match=r"model\.rotary") as caught:
        start(run)
    assert "inv_freq" in str(caught.value)
    assert unresettable_modules(build(run)) == ["model.rotary"]


class Forgetful(CausalModel):
    """Its rule leaves norms alone."""

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, Norm):
            super()._init_weights(module)


def test_a_parameter_that_the_rule_forgets_is_refused_instead_of_being_garbage() -> None:
    with pytest.raises(ConfigError, match=r"model\.norm \(Norm\)|input_norm"):
        start(Run(partial(Forgetful, has_table=False), own_loss, is_meta=True))
