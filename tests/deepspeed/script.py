import argparse
import json

import deepspeed
import torch
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--client_optimizer", action="store_true")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(dist_backend="gloo")

torch.manual_seed(0)
layers = [torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)]
model = torch.nn.Sequential(*layers)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.3) if args.client_optimizer else None
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args, model=model, optimizer=optimizer, model_parameters=model.parameters(), training_data=data
)
losses, norms, rates, at = [], [], [], None
for epoch in range(3):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr()[0])
    if epoch == 0:
        engine.save_checkpoint(args.folder, tag="middle", client_state={"losses": len(losses)})
    if epoch == 1:  # the third epoch is the second once more
        at = engine.load_checkpoint(args.folder, tag="middle")[1]["losses"]

result = {"losses": losses, "norms": list(map(float, filter(None, norms))), "rates": rates, "at": at}
with open(f"{args.folder}/result-{torch.distributed.get_rank()}.json", "w") as file:
    json.dump(result | {"steps": engine.global_steps}, file)
