"""Accelerate, Lightning and Hugging Face's Trainer run on the backend "paceline", as in docs/torch-distributed.md."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from one_world import run_in_forks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline.interop.torch_backend


def require_installed(*libraries: str) -> None:
    """Skips the test if packages are missing; does not import them, which would take as long as the test."""
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed; `make test` installs it")


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(32.0).view(16, 2) / 32, torch.arange(16.0).view(16, 1))


def require_equal_weights(module: nn.Module) -> None:
    for param in module.parameters():
        everybodys = [torch.empty_like(param) for _ in range(torch_dist.get_world_size())]
        torch_dist.all_gather(everybodys, param.detach())
        assert all(torch.equal(each, param) for each in everybodys)


def accelerated() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    assert (accelerator.num_processes, accelerator.process_index) == (size, rank)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), 1e-4)
    model, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(numbers(), batch_size=2))
    assert isinstance(model, DistributedDataParallel)
    seen = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        seen += accelerator.gather_for_metrics(targets)[:, 0].tolist()
    assert sorted(seen) == list(range(16))
    require_equal_weights(module)
    accelerator.wait_for_everyone()


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trained(directory: str, resume_from: str | None = None) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        directory, use_cpu=True, max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], seed=1
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume_from)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert trainer.args.world_size == torch_dist.get_world_size()
    return trainer


def hugging_face(directory: str) -> None:
    first = trained(directory)
    losses = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(losses, first.evaluate()["eval_loss"])
    assert len(set(losses)) == 1
    require_equal_weights(first.model)
    resumed = trained(directory, str(Path(directory, "checkpoint-2")))
    for param, again in zip(first.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(param, again)


def accelerate_and_transformers(directory: str) -> None:
    paceline.interop.torch_backend.register()  # as the entry point does if the package is installed
    torch_dist.init_process_group("paceline")
    accelerated()
    hugging_face(directory)
    assert torch_dist.get_backend() == "paceline"
    torch_dist.destroy_process_group()


@pytest.mark.timeout(200)
def test_accelerate_and_the_transformers_trainer(ranks, tmp_path):
    require_installed("accelerate", "transformers")
    ranks(1)(run_in_forks, ["accelerate", "transformers"], 2, accelerate_and_transformers, str(tmp_path), timeout_s=180)


def started_environment() -> Any:
    """Returns the environment of ranks that are already running, as under `paceline run`, so Lightning starts none."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    return TorchElasticEnvironment()


def fabricated() -> None:
    from lightning.fabric import Fabric

    # Fabric takes the environment from its plugins if the strategy is given by name.
    fabric = Fabric(accelerator="cpu", devices=2, strategy="paceline", plugins=[started_environment()])
    fabric.launch()
    assert torch_dist.get_backend() == "paceline" and fabric.world_size == 2
    fabric.seed_everything(3 + fabric.global_rank)
    model, optimizer = fabric.setup(module := nn.Linear(2, 1), torch.optim.SGD(module.parameters(), 0.1))
    fabric.backward(model(torch.full((4, 2), float(fabric.global_rank))).mean())
    optimizer.step()
    require_equal_weights(module)
    assert fabric.all_reduce(torch.tensor([float(fabric.global_rank)]), reduce_op="mean").item() == 0.5
    fabric.barrier()


def lightning_module() -> Any:
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            assert isinstance(self.trainer.strategy.model, DistributedDataParallel)
            loss = (self.layers(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("rank", float(self.global_rank), sync_dist=True)
            self.log("samples", len(batch[0]), sync_dist=True, reduce_fx="sum")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    return Regression()


def lightning(directory: str, epochs: int, strategy: object, resume_from: str | None = None) -> nn.Module:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[started_environment()] if strategy == "paceline" else None,
        max_epochs=epochs,
        logger=False,
        callbacks=[ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = lightning_module()
    loader = DataLoader(numbers(), batch_size=2, shuffle=True)
    trainer.fit(module, loader, DataLoader(numbers(), batch_size=2), ckpt_path=resume_from)
    assert torch_dist.get_backend() == "paceline"
    assert trainer.current_epoch == epochs
    assert trainer.callback_metrics["rank"].item() == 0.5
    assert trainer.callback_metrics["samples"].item() == 16
    require_equal_weights(module)
    return module


def fabric_and_trainer(directory: str) -> None:
    import paceline.integrations.lightning as by_name

    assert by_name.PacelineStrategy.strategy_name == "paceline"
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")  # Lightning warns about the number of loader workers
    fabricated()
    torch_dist.destroy_process_group()
    whole = lightning(directory, 2, "paceline")
    by_backend = DDPStrategy(process_group_backend="paceline", cluster_environment=started_environment())
    resumed = lightning(directory, 2, by_backend, resume_from=f"{directory}/epoch=0.ckpt")
    for param, again in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(param, again)
    torch_dist.destroy_process_group()


@pytest.mark.timeout(200)
def test_lightning_fabric_and_its_trainer(ranks, tmp_path):
    require_installed("lightning")
    ranks(1)(run_in_forks, ["lightning"], 2, fabric_and_trainer, str(tmp_path), timeout_s=180)
