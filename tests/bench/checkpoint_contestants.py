"""The contestants of `checkpoint.py`, each in a rank's process: the same decoder and AdamW, each saved its own way.

Run by `checkpoint.py` under torchrun, never by hand. Rank 0 prints one line `RESULT {...}`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import SIZES, build_decoder, mean_loss

REGION = "us-east-1"


class Contestant:
    """Builds its engine around the model and takes one step, so that all states exist."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def step(self) -> None:
        """One training step of a few tokens."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Save and return when the checkpoint is there."""
        raise NotImplementedError

    def begin(self, path: str) -> Any:
        """Start a save in the background; `wait` of what it returns waits for the end."""
        raise ImportError("it has no asynchronous save")

    def blocked_s(self, begun: Any) -> float:
        """What a save has held up training after its call had returned."""
        return 0.0

    def load(self, path: str) -> None:
        raise NotImplementedError

    def ids(self) -> torch.Tensor:
        return torch.randint(0, SIZES[self.options.size][4], (1, 33), device=self.options.torch_device)


class Raydz(Contestant):
    def __init__(self, options: argparse.Namespace) -> None:
        import raydz

        super().__init__(options)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
        }
        self.engine = raydz.initialize(build_decoder(options.size, True, None), config, device=options.device)

    def step(self) -> None:
        self.engine.backward(mean_loss(self.engine, self.ids()))
        self.engine.step()

    def save(self, path: str) -> None:
        self.engine.save_checkpoint(path, "one")

    def begin(self, path: str) -> Any:
        return self.engine.save_checkpoint(path, "one", async_save=True)

    def blocked_s(self, begun: Any) -> float:
        return begun.blocked_s

    def load(self, path: str) -> None:
        self.engine.load_checkpoint(path, "one")


class Dcp(Contestant):
    """FSDP2 and torch.distributed.checkpoint; s3:// through s3torchconnector, with tenacity installed beside it."""

    def __init__(self, options: argparse.Namespace) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(options)
        self.model = build_decoder(options.size, False, options.torch_device)
        mesh = init_device_mesh(options.device, (dist.get_world_size(),))
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.group = dist.new_group(backend="gloo")  # a background save must not use the group of training

    def step(self) -> None:
        mean_loss(self.model, self.ids()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def storage(self, path: str, kind: str) -> Any:
        if not path.startswith("s3://"):
            import torch.distributed.checkpoint as dcp

            return (dcp.FileSystemWriter if kind == "write" else dcp.FileSystemReader)(path)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        config = S3ClientConfig(force_path_style=True)
        return (S3StorageWriter if kind == "write" else S3StorageReader)(REGION, path, s3client_config=config)

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), storage_writer=self.storage(path, "write"), process_group=self.group)

    def begin(self, path: str) -> Any:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(self.state(), storage_writer=self.storage(path, "write"), process_group=self.group)
        future.wait = future.result
        return future

    def load(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, storage_reader=self.storage(path, "read"), process_group=self.group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DeepSpeed(Contestant):
    """ZeRO-3 and `save_checkpoint`, as `torch.save` writes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed

        super().__init__(options)
        if options.path.startswith("s3://"):
            raise ImportError("it saves to files alone")
        model = build_decoder(options.size, False, options.torch_device)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self) -> None:
        self.engine.backward(mean_loss(self.engine, self.ids()))
        self.engine.step()

    def save(self, path: str) -> None:
        self.engine.save_checkpoint(path, "one")

    def load(self, path: str) -> None:
        if dist.get_world_size() != self.options.saved_ranks:
            raise ImportError("it loads another world size only after a conversion to its universal format")
        self.engine.load_checkpoint(path, "one")


SYSTEMS = {"raydz": Raydz, "dcp": Dcp, "deepspeed": DeepSpeed}


# -- what is measured -------------------------------------------------------------------------------------------------


def cpu_s() -> float:
    """Processor seconds of all threads of all ranks."""
    total = torch.tensor([time.process_time()], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def measure_saves(contestant: Contestant, is_async: bool, path: str, rounds: int) -> dict[str, float]:
    """The last round's checkpoint stays at `<path>/last`."""
    samples: dict[str, list[float]] = {"blocking_s": [], "total_s": [], "cpu_s": []}
    for index in range(rounds + 1):  # the first warms up buffers, connections and the page cache
        place = f"{path}/last" if index == rounds else f"{path}/{index}"
        used, started = cpu_s(), time.perf_counter()
        if is_async:
            begun = contestant.begin(place)
            returned_s = time.perf_counter() - started
            begun.wait()
            blocking_s = max(returned_s, contestant.blocked_s(begun))
        else:
            contestant.save(place)
            blocking_s = time.perf_counter() - started
        dist.barrier()
        total_s = time.perf_counter() - started
        used = cpu_s() - used
        if index:
            for name, value in (("blocking_s", blocking_s), ("total_s", total_s), ("cpu_s", used)):
                samples[name].append(value)
        if index < rounds and dist.get_rank() == 0 and not path.startswith("s3://"):
            shutil.rmtree(place)
    return summary(samples)


def measure_training(contestant: Contestant, path: str) -> dict[str, float]:
    """What a background save costs training: its call and the steps beside it, over the same steps without it."""

    def step_s() -> float:
        started = time.perf_counter()
        contestant.step()
        dist.barrier()
        return time.perf_counter() - started

    idle_s = statistics.median(step_s() for _ in range(7))
    started = time.perf_counter()
    begun = contestant.begin(f"{path}/beside")
    first_step_s = 0.0
    for index in range(2):
        contestant.step()
        if index == 0:
            first_step_s = time.perf_counter() - started
    blocked_s = contestant.blocked_s(begun)
    begun.wait()
    dist.barrier()
    return {"step_idle_s": idle_s, "first_step_excess_s": first_step_s - idle_s, "blocked_reported_s": blocked_s}


def measure_loads(contestant: Contestant, path: str, rounds: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {"load_s": [], "load_cpu_s": []}
    for index in range(rounds + 1):
        used, started = cpu_s(), time.perf_counter()
        contestant.load(f"{path}/last")
        dist.barrier()
        load_s = time.perf_counter() - started
        used = cpu_s() - used
        if index:
            samples["load_s"].append(load_s)
            samples["load_cpu_s"].append(used)
    return summary(samples)


def summary(samples: dict[str, list[float]]) -> dict[str, float]:
    """Medians; of times also the extremes."""
    found = {}
    for name, values in samples.items():
        found[name] = statistics.median(values)
        if name.endswith("total_s") or name == "load_s":
            found |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--system", "--phase", "--path", "--size", "--device"):
        parser.add_argument(name, required=True)
    for name in ("--rounds", "--saved-ranks"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    options.torch_device = torch.device("cuda", local_rank) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(options.torch_device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    try:
        contestant = SYSTEMS[options.system](options)
        contestant.step()
        if options.phase == "load":
            metrics = measure_loads(contestant, options.path, options.rounds)
        else:
            is_async = options.phase == "async"
            metrics = measure_saves(contestant, is_async, options.path, options.rounds)
            if is_async:
                metrics |= measure_training(contestant, options.path)
            else:
                metrics |= measure_loads(contestant, options.path, options.rounds)
        result = {"metrics": metrics, "note": ""}
    except ImportError as error:
        text = str(error)
        result = {"note": f"not installed: {text}" if "No module" in text else text}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
