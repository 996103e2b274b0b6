"""What DeepSpeed scripts call beyond one training: arguments, views, contexts, checkpoints, and refusals by name."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from raydz import deepspeed
from raydz.errors import ConfigError, TrainingError

LR, DECAY = 0.05, 0.2
X = torch.arange(48, dtype=torch.float32).view(8, 6).sin()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def config(stage: int = 0, **sections: Any) -> dict[str, Any]:
    params = {"lr": LR, "weight_decay": DECAY, "eps": 1e-4}
    base = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": 0.0}
    return base | {"zero_optimization": {"stage": stage}} | sections


def start(model: nn.Module | None = None, stage: int = 0, sections: dict | None = None, **arguments: Any):
    model = network() if model is None else model
    return deepspeed.initialize(model=model, config=config(stage, **(sections or {})), **arguments)


def train(engine, steps: int = 3) -> dict[str, np.ndarray]:
    """Whole weights after some steps on the same rows, all of them on every rank."""
    for _ in range(steps):
        engine.backward(engine(X).square().mean())
        engine.step()
    return {name: value.numpy().copy() for name, value in engine.raydz.full_state_dict().items()}


def train_plain(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3, factor=None) -> dict:
    """The same by torch alone; `factor` is a LambdaLR's function."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor) if factor else None
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=2e-6, err_msg=name)


def refused(where: str):
    return pytest.raises(ConfigError, match=where)


# -- parameters, optimizers, schedules ---------------------------------------------------------------------------------


def test_weight_decay_is_for_norms_and_biases_too_as_in_deepspeed() -> None:
    engine, *_ = start()
    model = network()
    assert_same(
        train(engine), train_plain(torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY, eps=1e-4), model)
    )


def test_groups_have_their_own_rate_and_decay() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        flat = [p for _, p in named if p.dim() == 1]
        return [{"params": [p for _, p in named if p.dim() == 2]}, {"params": flat, "lr": 0.01, "weight_decay": 0.0}]

    model, plain = network(), network()
    engine, optimizer, *_ = start(model, model_parameters=groups(model))
    oracle = torch.optim.AdamW(groups(plain), LR, weight_decay=DECAY, eps=1e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [LR, 0.01]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert_same(train(engine), train_plain(oracle, plain))


def test_schedules_with_rates_of_their_own_set_them_for_every_group_as_deepspeeds_do() -> None:
    model = network()
    groups = [{"params": [p], "lr": 0.01 * i} for i, p in enumerate(model.parameters(), 1)]
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.3, "cycle_max_lr": 0.7, "cycle_first_step_size": 4}}
    engine, *_ = start(model, model_parameters=groups, sections={"scheduler": cycle})
    assert engine.get_lr() == pytest.approx([0.3] * 6)
    warm = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}}
    with refused("warmup_min_lr"):
        model = network()
        start(model, model_parameters=[{"params": list(model.parameters()), "lr": 1.0}], sections={"scheduler": warm})


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=0.03, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-4),
        partial(torch.optim.Adam, lr=0.03, weight_decay=0.1, eps=1e-4),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    ],
    ids=["AdamW", "Adam", "SGD"],
)
def test_a_torch_optimizer_is_taken_over(make) -> None:
    model, plain = network(), network()
    engine, *_ = start(model, optimizer=make(model.parameters()))
    assert_same(train(engine), train_plain(make(plain.parameters()), plain))
    engine, *_ = start(model := network(), optimizer=make)  # or a function that makes it
    assert_same(train(engine), {name: value for name, value in plain.state_dict().items()})


def test_a_lambda_schedule_is_taken_over() -> None:
    def factor(epoch: int) -> float:
        return 1 / (1 + epoch)

    plain = network()
    oracle = train_plain(torch.optim.AdamW(plain.parameters(), LR, weight_decay=DECAY, eps=1e-4), plain, factor=factor)
    engine, *_, scheduler = start(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    assert_same(train(engine), oracle)
    assert scheduler.get_last_lr() == pytest.approx([LR / 4])
    model = network()
    own = torch.optim.AdamW(model.parameters(), LR)
    engine, *_ = start(model, optimizer=own, lr_scheduler=torch.optim.lr_scheduler.LambdaLR(own, factor))
    train(engine, 1)
    assert engine.get_lr() == pytest.approx([LR / 2])


def test_optimizers_and_schedules_that_are_not_known_are_refused() -> None:
    model = network()
    with refused("Rprop"):
        start(model, optimizer=torch.optim.Rprop(model.parameters()))
    with refused("amsgrad"):
        start(model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    with refused("betas"):
        first, *rest = model.parameters()
        start(model, optimizer=torch.optim.AdamW([{"params": [first], "betas": (0.1, 0.2)}, {"params": rest}]))
    used = torch.optim.AdamW(model.parameters())
    train_plain(used, model, 1)
    with refused("moments"):
        start(model, optimizer=used)
    with refused("lr_scheduler"):
        start(model, lr_scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(model.parameters()), 2))
    with refused("model_parameters"):
        start(model, model_parameters=[nn.Parameter(torch.zeros(1))])
    with refused("in no group"):
        start(model, model_parameters=list(model.parameters())[1:])


# -- what initialize takes ---------------------------------------------------------------------------------------------


def test_configuration_comes_from_the_command_line_or_an_argument(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4, "optimizer": {"type": "AdamW"}}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    assert args.deepspeed
    assert deepspeed.initialize(args, network())[0].train_batch_size() == 4
    assert deepspeed.initialize(model=network(), config_params=str(file))[0].train_batch_size() == 4
    with refused("given twice"):
        deepspeed.initialize(args, network(), config=config())
    with refused("no configuration"):
        deepspeed.initialize(parser.parse_args([]), network())
    with refused("optimizer"):
        deepspeed.initialize(model=network(), config={"train_batch_size": 4})
    with refused("no model"):
        deepspeed.initialize(config=config())


def read_rows(rank: int, world_size: int) -> tuple[list[list[float]], list[list[float]], int]:
    data = TensorDataset(torch.arange(10.0)[:, None])
    sections = {"train_batch_size": 4, "gradient_accumulation_steps": 1}
    engine, _, loader, _ = start(nn.Linear(1, 1), sections=sections, training_data=data)
    assert engine.training_dataloader is loader
    own = DistributedSampler(data, num_replicas=world_size, rank=rank)
    wanted = [float(index) for index in own]
    return [batch[0].flatten().tolist() for batch in loader], [wanted[i : i + 2] for i in range(0, 5, 2)], len(loader)


def test_training_data_is_dealt_out_in_micro_batches(ranks) -> None:
    found = ranks(2).run(read_rows)
    for rows, wanted, length in found:
        assert rows == wanted and length == 3
    assert {row for rows, *_ in found for batch in rows for row in batch} == set(map(float, range(10)))


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_arguments_without_a_counterpart_are_refused(name: str) -> None:
    with refused(rf"{name}="):
        start(**{name: object()})
    with refused("training_data"):
        start(training_data=iter([1]))


# -- the engine --------------------------------------------------------------------------------------------------------


def test_engine_answers_what_scripts_ask() -> None:
    sections = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    engine, *_ = start(stage=2, sections=sections)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (2, 0.5)
    assert (engine.zero_optimization_stage(), engine.zero_optimization(), engine.bfloat16_enabled()) == (2, True, False)
    assert (engine.local_rank, engine.global_rank, engine.world_size, engine.device.type) == (0, 0, 1, "cpu")
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    boundaries = []
    for _ in range(4):
        engine.backward(engine(X).square().mean())
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert boundaries == [False, True, False, True]
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples) == (2, 4, 0, 16)
    assert engine.get_global_grad_norm() > 0 and engine.was_step_applied()
    assert len(list(engine.parameters())) == 6 and isinstance(engine.module, nn.Sequential)  # the module's own
    assert not engine.eval().module.training and engine.train().module.training
    engine.destroy()
    assert not engine.raydz._hooks


def test_a_loss_that_is_not_to_be_divided_by_accumulation_is_not() -> None:
    two, *_ = start(sections={"gradient_accumulation_steps": 2})
    for _ in range(2):
        two.backward(two(X).square().mean() / 2, scale_wrt_gas=False)
        two.step()
    one, *_ = start()
    train(one, 1)
    assert two.get_global_grad_norm() == pytest.approx(one.get_global_grad_norm(), rel=1e-6)


def sum_unreduced(rank: int, world_size: int, stage: int) -> dict[str, np.ndarray]:
    engine, *_ = start(stage=stage)
    rows = X.chunk(4)
    with engine.no_sync():
        engine.backward(engine(rows[rank]).square().mean())
        assert all(grads.reduced is None for grads in engine.raydz.sharded.gradients)  # nothing has travelled
        with pytest.raises(TrainingError, match="no_sync"):
            engine.step()
    engine.backward(engine(rows[rank + 2]).square().mean())
    engine.step()
    return {name: value.numpy().copy() for name, value in engine.raydz.full_state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_adds_up_what_the_next_backward_reduces(ranks, stage: int) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY, eps=1e-4)
    sum(model(rows).square().mean() / 2 for rows in X.chunk(4)).backward()
    optimizer.step()
    wanted = {name: value.detach().numpy() for name, value in model.named_parameters()}
    assert_same(ranks(2).run(sum_unreduced, stage)[0], wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_is_refused_where_gradients_are_sharded(stage: int) -> None:
    engine, *_ = start(stage=stage)
    with refused(f"stage {stage}"), engine.no_sync():
        raise AssertionError("unreachable")


def test_views_are_read_and_their_steps_do_nothing() -> None:
    warm = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine, optimizer, _, scheduler = start(sections={"scheduler": warm})
    before = train(engine, 4)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == scheduler.get_lr()[0] == 3 / 4 * 0.5
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert engine.get_lr() == [3 / 4 * 0.5] and engine.global_steps == 4
    assert_same({name: value.numpy() for name, value in engine.raydz.full_state_dict().items()}, before)
    with refused("param_groups"):
        optimizer.param_groups[0]["lr"] = 1.0
    with refused("sharded"):
        optimizer.state_dict()
    scheduler.load_state_dict(scheduler.state_dict())
    with refused("follows the engine"):
        scheduler.load_state_dict({"last_batch_iteration": 99})


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_by_tag_by_latest_and_none(tmp_path: Path) -> None:
    engine, *_ = start(stage=3)
    assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
    first = train(engine, 1)
    assert engine.save_checkpoint(tmp_path, "early", {"epoch": 1}) is True
    assert (tmp_path / "latest").read_text() == "early"
    second = train(engine, 1)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 2}, save_latest=False)
    other, *_ = start(stage=1)
    path, client_state = other.load_checkpoint(tmp_path)
    assert path.endswith("/early") and client_state == {"epoch": 1} and other.global_steps == 1
    assert_same(train(other, 0), first)
    path, client_state = other.load_checkpoint(tmp_path, "step-0000000002")
    assert client_state == {"epoch": 2}
    assert_same(train(other, 0), second)
    for name in ("load_optimizer_states", "load_lr_scheduler_states"):
        with refused(name):
            other.load_checkpoint(tmp_path, **{name: False})
    with refused("load_module_only"):
        other.load_checkpoint(tmp_path, load_module_only=True)
    with refused("exclude_frozen_parameters"):
        other.save_checkpoint(tmp_path, "x", exclude_frozen_parameters=True)


# -- zero, comm, names -------------------------------------------------------------------------------------------------


def gather_and_change(rank: int, world_size: int) -> list[float]:
    engine, *_ = start(stage=3)
    weight = engine.module[0].weight
    with deepspeed.zero.GatheredParameters(weight):
        found = [float(weight.detach().sum())]
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        if deepspeed.comm.get_rank() == 0:
            weight.fill_(2.0)
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        found.append(float(weight.detach().sum()))
    with refused("modifier_rank"), deepspeed.zero.GatheredParameters(weight, modifier_rank=1):
        raise AssertionError("unreachable")
    return found


def test_gathered_parameters_are_whole_and_rank_zero_may_change_them(ranks) -> None:
    whole = float(network()[0].weight.detach().sum())
    for first, second in ranks(2).run(gather_and_change):
        assert first == pytest.approx(whole, abs=1e-5)
        assert second == 96.0


def save_weights(rank: int, world_size: int, folder: str, gathers: bool) -> bool:
    key = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": gathers}
    engine = start(sections={"zero_optimization": key, "bf16": {"enabled": True}})[0]
    saved = engine.save_16bit_model(folder, "half.safetensors")
    engine.destroy()
    return saved


def test_16bit_weights_are_saved_where_the_key_says_so_and_else_false_is_returned(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(save_weights, str(tmp_path), False) == [False, False] and not list(tmp_path.iterdir())
    assert ranks(2).run(save_weights, str(tmp_path), True) == [True, True]
    state = load_file(tmp_path / "half.safetensors")
    wanted = {name: value.to(torch.bfloat16) for name, value in network().state_dict().items()}
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_parameters_without_an_engine_are_whole_anyway() -> None:
    model = network()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        model[0].weight.fill_(3.0)
    engine, *_ = start(model, stage=3)
    assert float(engine.raydz.full_state_dict()["0.weight"].sum()) == 3.0 * 48


def test_a_model_built_within_init_has_no_values_until_it_is_sharded() -> None:
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = network()
    assert all(p.is_meta for p in model.parameters())
    engine, optimizer, *_ = start(model, stage=3)
    before, after = train(engine, 0), train(engine, 1)
    assert all(np.isfinite(value).all() for value in before.values()) and any(
        (before[n] != after[n]).any() for n in after
    )
    assert not optimizer.param_groups[0]["params"][0].is_meta
    with deepspeed.zero.Init(enabled=False):
        assert not next(network().parameters()).is_meta
    with refused("remote_device"), deepspeed.zero.Init(remote_device="cpu"):
        raise AssertionError("unreachable")


def talk(rank: int, world_size: int) -> tuple[int, int, int, float]:
    from raydz.deepspeed import comm

    deepspeed.init_distributed("gloo")
    comm.barrier()
    total = torch.tensor([float(rank + 1)])
    comm.all_reduce(total)
    return comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), float(total)


def test_the_few_functions_of_comm(ranks) -> None:
    assert ranks(2).run(talk) == [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (0, 1)
    deepspeed.comm.barrier()
    with refused("dist_backend"):
        deepspeed.init_distributed("mpi")
    with refused("launcher's environment"):
        deepspeed.init_distributed(init_method="tcp://10.0.0.1:1")


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda: deepspeed.init_inference, "deepspeed.init_inference"),
        (lambda: deepspeed.moe, "deepspeed.moe"),
        (lambda: deepspeed.anything_else, "deepspeed.anything_else"),
        (lambda: deepspeed.zero.TiledLinear, "deepspeed.zero.TiledLinear"),
        (lambda: deepspeed.comm.inference_all_reduce, "deepspeed.comm.inference_all_reduce"),
        (lambda: start()[0].train_batch, "DeepSpeedEngine.train_batch"),
        (lambda: start()[0].set_gradient_accumulation_boundary, "set_gradient_accumulation_boundary"),
    ],
)
def test_a_name_of_deepspeed_that_is_not_here_is_refused(ask, name: str) -> None:
    with refused(name):
        ask()
    assert not hasattr(deepspeed, "anything_else")
