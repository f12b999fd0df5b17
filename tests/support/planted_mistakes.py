"""Training scripts with one mistake each, on the line that ends in `# !`, and correct scripts."""

from __future__ import annotations

from textwrap import dedent


def _script(text: str) -> str:
    return dedent(text).strip() + "\n"


_START = """
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler

import paceline as dist

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
train_set, test_set = load_data()
model = dist.DistributedDataParallel(nn.Linear(4, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def _started(text: str) -> str:
    return _START.lstrip() + _script(text)


RANK_MISTAKES: dict[str, list[str]] = {
    "no-main-guard": [
        _script("""
            import torch.multiprocessing as mp
            import torch.distributed as dist
            def work(rank):
                dist.init_process_group("gloo", rank=rank, world_size=2)
            mp.spawn(work, nprocs=2)  # !
        """),
        _script("""
            import paceline as dist
            def work(rank):
                dist.init_process_group()
            def main():
                dist.spawn(work, nprocs=2)  # !
            main()
        """),
        _script("""
            import torch.multiprocessing as mp
            import torch.distributed as dist
            def work(rank, size):
                dist.init_process_group("gloo", rank=rank, world_size=size)
            mp.set_start_method("spawn")
            processes = [mp.Process(target=work, args=(rank, 2)) for rank in range(2)]  # !
            for process in processes:
                process.start()
        """),
        _script("""
            from torch import multiprocessing as mp
            import torch.distributed as dist
            def run(rank):
                dist.init_process_group('gloo', rank=rank, world_size=2)
            ctx = mp.get_context('spawn')
            ps = [ctx.Process(target=run, args=(r,)) for r in range(2)]  # !
            [p.start() for p in ps]
        """),
        _script("""
            from multiprocessing import Process, set_start_method
            import torch.distributed as dist
            def run(rank):
                dist.init_process_group('gloo', rank=rank, world_size=2)
            set_start_method('spawn')
            for r in range(2):
                p = Process(target=run, args=(r,))  # !
                p.start()
        """),
    ],
    "spawn-target": [
        _script("""
            import paceline as dist
            if __name__ == "__main__":
                dist.spawn(lambda rank: dist.init_process_group(), nprocs=2)  # !
        """),
        _script("""
            import torch.multiprocessing as mp
            def main():
                def work(rank):
                    print(rank)
                mp.spawn(work, nprocs=2)  # !
            if __name__ == "__main__":
                main()
        """),
    ],
    "not-all-ranks": [
        _started("""
            from torch.distributed.optim import ZeroRedundancyOptimizer
            sharded = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1,
                parameters_as_bucket_view=True, overlap_with_ddp=False,
            )
            if rank == 0:
                sharded.consolidate_state_dict(to=0)  # !
        """),
        _script("""
            import torch
            import torch.distributed as dist
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            dist.init_process_group("nccl")
            model = FSDP(torch.nn.Linear(64, 64))
            if dist.get_rank() == 0:
                state = model.state_dict()  # !
                torch.save(state, "model.pt")
        """),
        _started("if rank == 0:\n    dist.all_reduce(loss)  # !"),
        _started("if rank < 2:\n    dist.all_reduce(torch.ones(1))  # !"),
        _started("if rank in (0, 1):\n    dist.barrier()  # !"),
        _started("if not rank:\n    dist.broadcast(loss, 0)  # !"),
        _started("if rank % 2 == 0:\n    group = dist.new_group([0, 2, 4])  # !"),
        _started("if rank < 2:\n    group = dist.new_group([0, 1])  # !"),
        _started("is_main = rank == 0\nif is_main and os.path.exists('x'):\n    dist.barrier()  # !"),
        _started("rank == 0 and dist.barrier()  # !"),
        _started("def evaluate():\n    dist.all_reduce(loss)  # !\nif rank == 0:\n    evaluate()"),
        _started("def log():\n    if rank != 0:\n        return\n    dist.barrier()  # !\nlog()"),
        _started("if rank != world_size - 1:\n    dist.all_gather_object(xs, rank)  # !"),
        _started("if int(os.environ['LOCAL_RANK']) == 0:\n    dist.barrier()  # !"),
        _script("""
            import torch
            import torch.distributed as dist
            class Trainer:
                def __init__(self):
                    self.rank = dist.get_rank()
                @property
                def is_main(self):
                    return self.rank == 0
                def mean(self, loss):
                    dist.all_reduce(loss)  # !
                    return loss
                def train(self):
                    loss = torch.ones(1)
                    if self.is_main:
                        print(self.mean(loss))
            dist.init_process_group("nccl")
            Trainer().train()
        """),
        _script("""
            import horovod.torch as hvd
            hvd.init()
            if hvd.rank() == 0:
                hvd.allreduce(loss)  # !
        """),
        _script("""
            import sys
            import torch.distributed as dist
            dist.init_process_group("gloo")
            if dist.get_rank() > 0:
                sys.exit(0)
            dist.barrier()  # !
        """),
        _started("loss = model(x).sum()\nif rank == 0:\n    loss.backward()  # !"),
        _started("if rank == 0:\n    model2 = dist.DistributedDataParallel(nn.Linear(1, 1))  # !"),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            loss = torch.rand(1)
            if loss.item() > 0.5:
                dist.all_reduce(loss)  # !
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            ranks=[0, 1]
            if dist.get_rank() in ranks:
                g = dist.new_group(ranks)  # !
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            if dist.get_rank() == 0:
                print(1)
            else:
                dist.barrier()  # !
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            x = torch.ones(1)
            y = dist.all_reduce(x) if dist.get_rank() == 0 else None  # !
        """),
        _script("""
            import torch
            import torch.distributed as dist
            import torch.multiprocessing as mp
            def run(rank, size):
                dist.init_process_group('gloo', rank=rank, world_size=size)
                if rank < size // 2:
                    dist.all_reduce(torch.ones(1))  # !
            if __name__ == '__main__':
                mp.spawn(run, args=(4,), nprocs=4)
        """),
        _script("""
            import torch
            import torch.distributed as dist
            import torch.multiprocessing as mp
            def run(rank, size):
                dist.init_process_group('gloo', rank=rank, world_size=size)
                if rank < 2:
                    dist.all_reduce(torch.ones(1))  # !
            if __name__ == '__main__':
                ps=[]
                for rank in range(4):
                    p = mp.Process(target=run, args=(rank, 4))
                    p.start()
                    ps.append(p)
                for p in ps: p.join()
        """),
        _script("""
            import argparse
            import torch
            parser = argparse.ArgumentParser()
            parser.add_argument("--local_rank", type=int, default=-1)
            args = parser.parse_args()
            def load(evaluate=False):
                if args.local_rank not in [-1, 0]:
                    torch.distributed.barrier()
                features = read()
                if args.local_rank == 0:
                    torch.distributed.barrier()  # !
                return features
            torch.cuda.set_device(args.local_rank)
            torch.distributed.init_process_group(backend="nccl")
            if args.local_rank not in [-1, 0]:
                torch.distributed.barrier()
            model = torch.nn.Linear(4, 1)
            if args.local_rank == 0:
                torch.distributed.barrier()
            load()
            if args.local_rank in [-1, 0]:
                load(evaluate=True)
        """),
    ],
    "different-order": [
        _started("""
            if rank == 0:
                dist.broadcast(a, 0)  # !
                dist.all_reduce(b)
            else:
                dist.all_reduce(b)
                dist.broadcast(a, 0)
        """),
    ],
    "different-group": [
        _started("""
            half = world_size // 2
            if rank < half:
                group = dist.new_group(list(range(half)))  # !
            else:
                group = dist.new_group(list(range(half, world_size)))
        """),
        _started("pair = dist.new_group([rank, rank ^ 1])  # !"),
    ],
    "same-output": [
        _started("outputs = [torch.zeros(4)] * world_size\ndist.all_gather(outputs, torch.ones(4))  # !"),
        _started("dist.gather(loss, [torch.empty_like(loss)] * world_size if rank == 0 else None, dst=0)  # !"),
    ],
    "receive-deadlock": [
        _script("""
            import torch
            import torch.distributed as dist
            import torch.multiprocessing as mp
            def exchange(rank, tensor):
                other = torch.empty_like(tensor)
                dist.recv(other, src=1 - rank)  # !
                dist.send(tensor, dst=1 - rank)
            def run(rank, size):
                dist.init_process_group("gloo", rank=rank, world_size=size)
                exchange(rank, torch.ones(3))
            if __name__ == "__main__":
                mp.spawn(run, args=(2,), nprocs=2)
        """),
        _started("dist.recv(loss, (rank - 1) % world_size)  # !\ndist.send(loss, (rank + 1) % world_size)"),
    ],
    "different-root": [
        _started("dist.broadcast(loss, src=rank)  # !"),
        _started("dist.broadcast_object_list(objects, dist.get_rank())  # !"),
    ],
    "message-to-itself": [_started("if rank == 0:\n    dist.send(loss, 0)  # !")],
    "no-receiver": [_started("if rank == 0:\n    dist.send(loss, 1)  # !")],
    "uneven-loop": [
        _started("""
            loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set, shuffle=False))
            best, patience = float("inf"), 0
            for epoch in range(100):
                total = 0.0
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    total += loss.item()
                if total < best:
                    best, patience = total, 0
                else:
                    patience += 1
                if patience >= 5:
                    break  # !
        """),
        _started("for _ in range(rank + 1):  # !\n    dist.all_reduce(loss)"),
        _started("""
            loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set))
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                if loss.item() < 0.1:
                    break  # !
        """),
        _started("""
            for step in range(100):
                if rank == 1 and step == 5:
                    break  # !
                dist.all_reduce(torch.ones(1))
        """),
        _started("""
            import time
            begin = time.time()
            while True:
                model(x).sum().backward()
                if time.time() - begin > 60:
                    break  # !
        """),
        _started("""
            def train(loader):
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x), y)
                    if loss > 10:
                        continue  # !
                    loss.backward()
            train(DataLoader(train_set, 8, sampler=DistributedSampler(train_set)))
        """),
        _started("""
            for step, (x, y) in enumerate(DataLoader(train_set, sampler=DistributedSampler(train_set))):
                if step >= 100 - rank:
                    break  # !
                model(x).sum().backward()
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            steps = 10 if dist.get_rank() == 0 else 12
            for _ in range(steps):  # !
                dist.all_reduce(torch.ones(1))
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
            loss = torch.tensor(1.0)
            while loss > 0.1:  # !
                loss = model(torch.randn(8, 4)).pow(2).mean()
                loss.backward()
        """),
        _script("""
            import random
            import torch
            import paceline as dist
            dist.init_process_group()
            for i in range(100):
                if random.random() < 0.1:
                    break  # !
                dist.barrier()
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            rank=dist.get_rank()
            for i in range(10):
                if i == 5 + rank:
                    break  # !
                dist.barrier()
        """),
        _script("""
            import torch
            import paceline as dist
            from torch.utils.data import DataLoader
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
            ds = torch.utils.data.TensorDataset(torch.randn(64, 4))
            sampler = dist.DistributedSampler(ds)
            for epoch in range(3):
                sampler.set_epoch(epoch)
                for step, (x,) in enumerate(DataLoader(ds, 8, sampler=sampler)):
                    if dist.get_rank() == 0 and step == 3:
                        break  # !
                    model(x).sum().backward()
        """),
    ],
    "all-ranks-save": [
        _started("torch.save(model.module.state_dict(), 'model.pt')  # !"),
        _started(
            "for epoch in range(9):\n    if epoch % 3 == 0:\n        torch.save(optimizer.state_dict(), 'o.pt')  # !"
        ),
        _started("with open('log.txt', 'w') as f:  # !\n    f.write('done')"),
        _started("log = open(os.path.join('out', 'log.txt'), mode='w')  # !"),
        _started("if rank != 0:\n    torch.save(optimizer.state_dict(), 'o.pt')  # !"),
        _started("model.module.save_pretrained('out')  # !"),
        _started("from pathlib import Path\nPath('metrics.json').write_text('{}')  # !"),
        _started("import numpy as np\nnp.save('out.npy', [1])  # !"),
        _script("""
            import argparse, torch
            import torch.distributed as dist
            class Trainer:
                def __init__(self, path):
                    self.path = path
                def save(self, epoch):
                    torch.save({"epoch": epoch}, self.path)  # !
                def train(self):
                    for epoch in range(3):
                        self.save(epoch)
            def main():
                args = argparse.ArgumentParser().parse_args()
                dist.init_process_group("gloo")
                Trainer(args.path).train()
            if __name__ == "__main__":
                main()
        """),
        _script("""
            import logging
            import paceline as dist
            dist.init_process_group()
            logging.basicConfig(filename='train.log', filemode='w')  # !
            logging.info('x')
        """),
        _script("""
            import torch
            import torch.distributed as dist
            from absl import app
            def main(argv):
                dist.init_process_group("gloo")
                torch.save({}, "model.pt")  # !
            if __name__ == "__main__":
                app.run(main)
        """),
    ],
    "all-ranks-mkdir": [_started("os.makedirs('out')  # !"), _started("os.mkdir('out')  # !")],
    "all-ranks-download": [
        _started("from torchvision import datasets\nd = datasets.MNIST('data', train=True, download=True)  # !"),
        _started("import urllib.request\nurllib.request.urlretrieve(url, 'data.zip')  # !"),
        _started("os.system('wget https://example.org/data.zip')  # !"),
        _script("""
            import torchvision
            import paceline as dist
            dist.init_process_group()
            train = torchvision.datasets.CIFAR10('data', True, download=True)  # !
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            torch.hub.download_url_to_file('https://x/y.pt', 'y.pt')  # !
        """),
        _script("""
            from urllib.request import urlretrieve
            import os
            import paceline as dist
            dist.init_process_group()
            if not os.path.exists('y.pt'):
                urlretrieve('https://x/y.pt', 'y.pt')  # !
        """),
        _script("""
            import torchvision
            import paceline as dist
            train = torchvision.datasets.CIFAR10('data', True, download=True)  # !
            dist.init_process_group()
        """),
    ],
    "no-wait": [
        _started("dist.all_reduce(loss, async_op=True)  # !\nprint(loss)"),
        _started("work = dist.broadcast(loss, 0, async_op=True)  # !"),
        _started("if rank == 0:\n    dist.isend(loss, 1)  # !\nelse:\n    dist.recv(loss, 0)"),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            handles=[]
            for p in model.parameters():
                handles.append(dist.all_reduce(p.grad, async_op=True))  # !
            optimizer.step()
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            def mean(t):
                dist.all_reduce(t, async_op=True)  # !
                t /= 2
                return t
            mean(torch.ones(1))
        """),
    ],
    "use-before-wait": [
        _started("work = dist.all_reduce(loss, async_op=True)\nloss /= world_size  # !\nwork.wait()"),
        _started("work = dist.all_reduce(loss, async_op=True)\nprint(loss.item())  # !\nwork.wait()"),
    ],
    "before-init": [
        _script("""
            import torch
            import paceline as dist
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))  # !
            dist.init_process_group()
        """),
        _script("""
            import torch
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel as DDP
            def build():
                return DDP(torch.nn.Linear(4, 1))  # !
            def main():
                model = build()
                dist.init_process_group("gloo")
            if __name__ == "__main__":
                main()
        """),
        _script("""
            import torch.distributed as dist
            rank = dist.get_rank()  # !
            dist.init_process_group("gloo")
        """),
        _script("""
            import torch
            import paceline as dist
            def main():
                model = torch.nn.Linear(4, 1)
                model = dist.DistributedDataParallel(model)  # !
                dist.init_process_group()
                model(torch.randn(2, 4)).sum().backward()
            main()
        """),
    ],
}
"""By rule of `rank_rules.py`."""

TRAINING_MISTAKES: dict[str, list[str]] = {
    "changed-after-wrap": [
        _started("model.module.head = nn.Linear(4, 10)  # !"),
        _started("model.module[0] = nn.Linear(4, 10)  # !"),
        _started("model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # !"),
        _started("model.module.add_module('head', nn.Linear(4, 10))  # !"),
        _script("""
            import torch.nn as nn
            import paceline as dist
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Linear(4, 1)
            dist.init_process_group()
            net = Net()
            model = dist.DistributedDataParallel(net)
            net.fc = nn.Linear(4, 2)  # !
        """),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4)))
            model.fc = torch.nn.Linear(4, 2)  # !
        """),
        _script("""
            import torch
            from torch import nn
            import paceline as dist
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.body = nn.Linear(4, 4)
                    self.head = nn.Linear(4, 1)
                def forward(self, x):
                    return self.head(self.body(x))
            def new_head(net, n):
                net.head = nn.Linear(4, n)  # !
            dist.init_process_group()
            model = dist.DistributedDataParallel(Net())
            new_head(model.module, 10)
        """),
        _script("""
            import torch
            import torchvision
            import paceline as dist
            dist.init_process_group()
            model = torchvision.models.resnet18()
            ddp = dist.DistributedDataParallel(model)
            model.fc = torch.nn.Linear(512, 10)  # !
        """),
    ],
    "not-wrapped": [
        _started("model.module(x).sum().backward()  # !"),
        _script("""
            import torch.nn as nn
            import paceline as dist
            dist.init_process_group()
            net = nn.Linear(4, 1)
            model = dist.DistributedDataParallel(net)
            loss = net(x).mean()
            loss.backward()  # !
        """),
    ],
    "never-wrapped": [
        _script("""
            import torch
            import torch.distributed as dist
            from torch.utils.data import DataLoader, DistributedSampler
            dist.init_process_group("gloo")
            sampler = DistributedSampler(train_set)
            model = torch.nn.Linear(4, 1)
            for epoch in range(3):
                sampler.set_epoch(epoch)
                for x, y in DataLoader(train_set, batch_size=8, sampler=sampler):
                    (model(x) - y).abs().mean().backward()  # !
            dist.barrier()
        """),
    ],
    "never-averaged": [
        _started("""
            for x in train_set:
                with model.no_sync():
                    model(x).sum().backward()  # !
                optimizer.step()
        """),
    ],
    "different-split": [
        _started("""
            torch.manual_seed(42 + rank)
            kept, rest = torch.utils.data.random_split(train_set, [80, 20])
            sampler = DistributedSampler(kept, shuffle=False)  # !
            loader = DataLoader(kept, batch_size=8, sampler=sampler)
        """),
    ],
    "wrapped-state-dict": [
        _started("if rank == 0:\n    torch.save(model.state_dict(), 'model.pt')  # !"),
        _started(
            "state = {'model': model.state_dict(), 'epoch': 1}\nif rank == 0:\n    torch.save(state, 'm.pt')  # !"
        ),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
            if dist.get_rank() == 0:
                torch.save(model, 'model.pt')  # !
        """),
    ],
    "no-sampler": [
        _started("loader = DataLoader(train_set, batch_size=8, shuffle=True)  # !"),
        _started("loader = DataLoader(train_set, 8)  # !\nfor x, y in loader:\n    model(x).sum().backward()"),
        _started("""
            from torchvision.datasets import FakeData
            def train(loader):
                for x, y in loader:
                    model(x).sum().backward()
            train(DataLoader(FakeData(), 8, num_workers=2))  # !
        """),
    ],
    "shuffle": [
        _started("""
            options = {"sampler": DistributedSampler(train_set)}
            options["shuffle"] = True
            loader = DataLoader(train_set, **options)  # !
        """),
        _started("s = DistributedSampler(train_set)\nloader = DataLoader(train_set, sampler=s, shuffle=True)  # !"),
    ],
    "no-set-epoch": [
        _started("""
            sampler = DistributedSampler(train_set)  # !
            loader = DataLoader(train_set, sampler=sampler)
            for epoch in range(3):
                for x, y in loader:
                    model(x).sum().backward()
        """),
        _started("""
            loader = DataLoader(train_set, sampler=DistributedSampler(train_set, seed=1))  # !
            def train():
                for x, y in loader:
                    pass
            for epoch in range(3):
                train()
        """),
        _script("""
            import torch
            from torch.utils.data import DataLoader
            import paceline as dist
            dist.init_process_group()
            ds = torch.utils.data.TensorDataset(torch.randn(64, 4))
            sampler = dist.DistributedSampler(ds, shuffle=True)  # !
            loader = DataLoader(ds, 8, sampler=sampler)
            for epoch in range(3):
                for i, (x,) in enumerate(loader):
                    pass
        """),
    ],
    "train-sampler": [
        _started("""
            loader = DataLoader(test_set, sampler=DistributedSampler(test_set))  # !
            correct = torch.zeros(1)
            with torch.no_grad():
                for x, y in loader:
                    correct += (model(x) == y).sum()
            dist.all_reduce(correct)
            print(correct.item() / len(loader.dataset))
        """),
        _script("""
            import torch
            from torch.utils.data import DataLoader
            import paceline as dist
            dist.init_process_group()
            test = torch.utils.data.TensorDataset(torch.arange(10.))
            loader = DataLoader(test, batch_size=2, sampler=dist.DistributedSampler(test))  # !
            correct = torch.zeros(1)
            model.eval()
            for (x,) in loader:
                correct += (model(x) > 0).sum()
            dist.all_reduce(correct)
            print(correct / len(test))
        """),
    ],
    "other-sampler": [
        _started("""
            sampler = DistributedSampler(train_set)
            loader = DataLoader(test_set, sampler=sampler)  # !
            model.eval()
            for x, y in loader:
                correct = model(x) == y
        """),
        _script("""
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            import paceline as dist
            dist.init_process_group()
            train = TensorDataset(torch.arange(100.))
            test = TensorDataset(torch.arange(10.))
            sampler = dist.DistributedSampler(train)
            loader = DataLoader(train, 2, sampler=sampler)
            test_loader = DataLoader(test, 2, sampler=sampler)  # !
            for x in test_loader:
                print(x)
        """),
    ],
    "batch-size": [
        _started(
            "s = DistributedSampler(train_set)\nloader = DataLoader(train_set, batch_size=8 * world_size, sampler=s)"
            "  # !"
        ),
        _started("""
            batch_size = 8
            batch_size *= dist.get_world_size()
            s = DistributedSampler(train_set)
            loader = DataLoader(train_set, batch_size, sampler=s)  # !
        """),
        _started("""
            import argparse
            args = argparse.ArgumentParser().parse_args()
            s = DistributedSampler(train_set)
            loader = DataLoader(train_set, batch_size=args.batch * world_size, sampler=s)  # !
        """),
        _script("""
            import torch
            from torch.utils.data import DataLoader
            import paceline as dist
            dist.init_process_group()
            ds = torch.utils.data.TensorDataset(torch.randn(64, 4))
            BATCH = 32
            loader = DataLoader(ds, batch_size=BATCH * dist.get_world_size(), sampler=dist.DistributedSampler(ds))  # !
            for x in loader: pass
        """),
    ],
    "no-map-location": [
        _started("model.module.load_state_dict(torch.load('model.pt'))  # !"),
        _started("checkpoint = torch.load('model.pt')  # !"),
    ],
    "first-gpu": [
        _started("model.to('cuda:0')  # !"),
        _started("device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')  # !"),
        _started("x = torch.zeros(4, device='cuda:0')  # !"),
        _started("model.cuda(0)  # !"),
        _script(
            "import torch\nimport paceline as dist\ndist.init_process_group()\nnet = torch.nn.Linear(4, 1).cuda()  # !"
        ),
        _script("import torch\nimport paceline as dist\ndist.init_process_group()\nmodel.to('cuda')  # !"),
        _script("import torch\nimport paceline as dist\ndist.init_process_group()\ntorch.cuda.set_device(0)  # !"),
        _script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(net, device_ids=[0])  # !
        """),
    ],
    "rank-as-gpu": [
        _started("other = dist.DistributedDataParallel(model, device_ids=[dist.get_rank()])  # !"),
        _started("torch.cuda.set_device(rank)  # !"),
    ],
    "late-visible-devices": [
        _started("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']  # !"),
    ],
}
"""By rule of `training_rules.py`."""


HEALTHY: dict[str, str] = {
    "a wrapper that an option chooses": _script("""
        import sys
        import apex
        import torch
        import torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        if sys.argv[1] == "apex":
            wrap = apex.parallel.DistributedDataParallel
        else:
            wrap = nn.parallel.DistributedDataParallel
        model = wrap(nn.Linear(8, 8))
        for step in range(10):
            model(torch.randn(4, 8)).square().mean().backward()
    """),
    "files that the ranks write in turns": _started("""
        class Runner:
            def __init__(self):
                self.master = dist.get_rank() == 0
            def prepare(self):
                if not self.master:
                    dist.barrier()
                if not os.path.exists("data.txt"):
                    with open("data.txt", "w") as f:
                        f.write("done")
                if self.master:
                    dist.barrier()
        Runner().prepare()
    """),
    "a function that returns its first result again": _started("""
        from functools import cache
        @cache
        def score(step):
            total = torch.ones(1)
            dist.all_reduce(total)
            return total
        best = score(3)
        if rank == 0:
            print(score(3))
    """),
    "a script for one machine": _script("""
        import argparse
        import torch
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)
        args = parser.parse_args()
        dist.init_process_group("nccl", rank=args.local_rank)
        assert args.local_rank == dist.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    """),
    "an imported function that selects the GPU": _script("""
        import torch
        import torch.distributed as dist
        from project import utils
        device = utils.get_device()
        dist.init_process_group("nccl")
        mask = torch.zeros(4, device="cuda")
    """),
    "an imported function that connects the ranks": _script("""
        import torch
        from distributed import init_distributed
        init_distributed(rank, world_size, backend="nccl")
        model = torch.nn.Linear(4, 1).cuda()
    """),
    "ranks that share a GPU through an option's default": _script("""
        import argparse
        import torch
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--backend", default="gloo")
        args = parser.parse_args()
        dist.init_process_group(args.backend)
        model = torch.nn.Linear(4, 1).to("cuda")
    """),
    "an output file for each command": _script("""
        import argparse
        import torch
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank", type=int)
        parser.add_argument("--output")
        args = parser.parse_args()
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:2345", world_size=2, rank=args.rank)
        with open(args.output, "w") as f:
            f.write("done")
    """),
    "a file named after a result of this rank": _script("""
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        model, loader = accelerator.prepare(torch.nn.Linear(4, 1), load_data())
        total = 0.0
        for x in loader:
            total += model(x).sum().item()
        torch.save(accelerator.unwrap_model(model).state_dict(), f"loss{total:.4f}.pt")
    """),
    "gradients that a hook averages": _script("""
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, DistributedSampler
        from project import prepared
        dist.init_process_group("gloo")
        sampler = DistributedSampler(train_set)
        model = prepared(torch.nn.Linear(4, 1))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(train_set, batch_size=8, sampler=sampler):
                (model(x) - y).abs().mean().backward()
    """),
    "a model that may be wrapped": _script("""
        import argparse
        import os
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler
        parser = argparse.ArgumentParser()
        parser.add_argument("--no_cuda", action="store_true")
        args = parser.parse_args()
        args.local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
        if args.local_rank == -1 or args.no_cuda:
            args.devices = 0 if args.no_cuda else torch.cuda.device_count()
        else:
            dist.init_process_group("nccl")
            args.devices = 1
        sampler = DistributedSampler(train_set, shuffle=False)
        loader = DataLoader(train_set, batch_size=8 * max(1, args.devices), sampler=sampler)
        model = torch.nn.Linear(4, 1)
        if args.mode:
            model = DDP(model)
        def save(model, path):
            model_to_save = model.module if hasattr(model, "module") else model
            torch.save(model_to_save.state_dict(), path)
        if args.local_rank == 0:
            save(model, "model.pt")
            torch.save((model.module if isinstance(model, DDP) else model).state_dict(), "other.pt")
    """),
    "a GPU that DeepSpeed selects": _script("""
        import deepspeed
        import torch
        deepspeed.init_distributed()
        loss = torch.nn.CrossEntropyLoss().cuda()
        model, optimizer, loader, _ = deepspeed.initialize(model=torch.nn.Linear(4, 1), training_data=load_data())
    """),
    "a checkpoint of every rank": _started("""
        optimizer.load_state_dict(torch.load(path + "_optimizer_{}.pt".format(rank)))
    """),
    "a script that is edited for each rank": _script("""
        import os
        import torch
        import torch.distributed as dist
        os.environ["RANK"] = "0"
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with open("log.txt", "w") as f:
            f.write("done")
    """),
    "a rank that is the local rank": _script("""
        import argparse
        import torch
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)
        args = parser.parse_args()
        torch.cuda.set_device(args.local_rank)
        dist.init_process_group("nccl", world_size=torch.cuda.device_count(), rank=args.local_rank)
        model = torch.nn.Linear(4, 1).cuda()
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[dist.get_rank()])
    """),
    "a model that a second test unwraps": _script("""
        import argparse
        import torch
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        args = parser.parse_args()
        args.distributed = True
        if args.no_cuda:
            args.distributed = False
        dist.init_process_group("gloo")
        model = torch.nn.Linear(4, 1)
        if args.distributed:
            model = torch.nn.parallel.DistributedDataParallel(model)
        if args.distributed:
            model = model.module
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "model.pt")
    """),
    "a rank that asks again": _started("""
        while True:
            if rank == 0:
                text = input()
                if not text:
                    continue
            objects = [text] if rank == 0 else [None]
            dist.broadcast_object_list(objects, src=0)
    """),
    "a command that the processes never run": _script("""
        import argparse
        import torch
        import torch.distributed as dist
        def worker(rank, args, world):
            if world > 1:
                dist.init_process_group("nccl", rank=rank, world_size=world)
            if args.command == "export":
                with open(args.path, "wb") as f:
                    f.write(b"done")
        if __name__ == "__main__":
            args = argparse.ArgumentParser().parse_args()
            world = torch.cuda.device_count()
            if args.command == "export" or world <= 1:
                worker(0, args, 1)
            else:
                torch.multiprocessing.spawn(worker, args=(args, world), nprocs=world)
    """),
    "a tool in a module of a training": _script("""
        import torch.distributed as dist
        class Dataset:
            def share(self):
                dist.barrier()
            def export(self):
                with open("infos.txt", "w") as f:
                    f.write("done")
        if __name__ == "__main__":
            data = Dataset()
            if data.shared:
                data.share()
            data.export()
    """),
    "a program that a library starts": _script("""
        import urllib.request
        import torch.distributed as dist
        from project import distributed_utils
        def evaluate():
            print(dist.get_rank())
        if __name__ == "__main__":
            urllib.request.urlretrieve("https://example.org/data", "data")
            distributed_utils.call_main(evaluate)
    """),
    "a loss that ends the job": _started("""
        import math
        import sys
        loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set))
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            if not math.isfinite(loss.item()):
                sys.exit(1)
            if step is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
    """),
    "a second loader that is not used": _started("""
        sampler = DistributedSampler(train_set, shuffle=False)
        loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        other = DataLoader(train_set, batch_size=8, shuffle=True)
        for x, y in loader:
            model(x).sum().backward()
    """),
    "a rank that uses all GPUs of its machine": _script("""
        import torch
        import torch.distributed as dist
        dist.init_process_group("nccl")
        tensors = []
        for index in range(torch.cuda.device_count()):
            tensors.append(torch.ones(1).cuda(index))
    """),
    "an exported model": _started("""
        if rank == 0:
            torch.onnx.export(model, (x,), "model.onnx")
    """),
    "files that exist before the processes start": _script("""
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from torchvision import datasets
        def work(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
            data = datasets.MNIST("data", train=True, download=True)
        if __name__ == "__main__":
            datasets.MNIST("data", train=True, download=True)
            mp.spawn(work, nprocs=2)
    """),
    "counters": _started("""
        sampler = DistributedSampler(train_set)
        loader = DataLoader(train_set, 8, sampler=sampler)
        step, stop = 0, False
        for epoch in range(100):
            sampler.set_epoch(epoch)
            total = torch.zeros(1)
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                total += loss.detach()
                step += 1
                if step >= 1000:
                    break
            dist.all_reduce(total)
            stop = total.item() < 0.1
            if stop or step >= 1000:
                break
    """),
    "groups, messages and gradients": _started("""
        half = world_size // 2
        for ranks in (list(range(half)), list(range(half, world_size))):
            group = dist.new_group(ranks)
        mine = dist.new_group([rank], use_local_synchronization=True)
        outputs = [torch.zeros(4) for _ in range(world_size)]
        dist.all_gather(outputs, torch.ones(4))
        objects = [None] * world_size
        dist.all_gather_object(objects, rank)
        if rank == 0:
            dist.send(loss, 1)
            dist.recv(loss, world_size - 1)
        else:
            dist.recv(loss, rank - 1)
            dist.send(loss, (rank + 1) % world_size)
        torch.manual_seed(7 + rank)
        kept, rest = torch.utils.data.random_split(train_set, [80, 20], generator=torch.Generator().manual_seed(0))
        loader = DataLoader(kept, 8, sampler=DistributedSampler(kept, shuffle=False))
        for x, y in loader:
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
    """),
    "a script in one process": _script("""
        import torch
        from torch.utils.data import DataLoader
        from torchvision import datasets
        loader = DataLoader(datasets.MNIST("data", download=True), batch_size=8, shuffle=True)
        model = torch.nn.Linear(784, 10).cuda()
        model.load_state_dict(torch.load("start.pt"))
        for x, y in loader:
            model(x.to("cuda:0")).sum().backward()
        torch.save(model.state_dict(), "model.pt")
        with open("log.txt", "w") as f:
            f.write("done")
    """),
    "everything": _started("""
        sampler = DistributedSampler(train_set)
        loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        state = torch.load("x.pt", map_location="cpu")
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            dist.all_reduce(loss)
            if loss.item() < 0.1:
                break
            if rank == 0:
                torch.save(model.module.state_dict(), "x.pt")
            dist.barrier()
        torch.save(optimizer.state_dict(), f"x-{rank}.pt")
        os.makedirs("out", exist_ok=True)
        dist.destroy_process_group()
    """),
    "the local rank as GPU": _script("""
        import os
        import torch
        import paceline as dist
        dist.init_process_group()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        other = torch.device(f"cuda:{dist.get_node_local_rank()}")
        model = dist.DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
        rank = dist.get_rank()
        x = torch.ones(4).to(rank % torch.cuda.device_count())
    """),
    "optional ranks": _script("""
        import os
        import torch
        from torch.distributed import init_process_group
        from torch.nn.parallel import DistributedDataParallel as DDP
        ddp = int(os.environ.get("RANK", -1)) != -1
        if ddp:
            init_process_group(backend="nccl")
            ddp_rank = int(os.environ["RANK"])
            device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
            torch.cuda.set_device(device)
            master_process = ddp_rank == 0
        else:
            master_process = True
            device = "cuda:0"
        if master_process:
            os.makedirs("out")
        checkpoint = torch.load("checkpoint.pt", map_location=device)
        model = torch.nn.Linear(4, 1).to(device)
        if ddp:
            model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])
        raw_model = model.module if ddp else model
        for step in range(100):
            if step % 10 == 0 and master_process:
                if step > 0:
                    torch.save({"model": raw_model.state_dict()}, os.path.join("out", "checkpoint.pt"))
            if step == 0 and False:
                break
            model(torch.randn(8, 4)).sum().backward()
    """),
    "a guard at the call, in a method, by a return and by an exit": _script("""
        import sys
        import torch
        import paceline as dist
        class Trainer:
            def __init__(self):
                self.rank = dist.get_rank()
            @property
            def is_main(self):
                return self.rank == 0
            def save(self):
                torch.save({}, "model.pt")
            def log(self, text):
                if not self.is_main:
                    return
                with open("log.txt", "w") as f:
                    f.write(text)
            def train(self):
                for epoch in range(3):
                    self.log("epoch")
                    if self.is_main and epoch % 2 == 0:
                        self.save()
        def is_main_process():
            return dist.get_rank() == 0
        def save_on_master(*args):
            if is_main_process():
                torch.save(*args)
        def rank_zero_only(function):
            return function
        @rank_zero_only
        def export():
            torch.save({}, "export.pt")
        def main():
            dist.init_process_group()
            Trainer().train()
            save_on_master({}, "last.pt")
            export()
            dist.barrier()
            if dist.get_rank() > 0:
                sys.exit()
            torch.save({}, "end.pt")
        if __name__ == "__main__":
            main()
    """),
    "a download on rank 0 first": _script("""
        import os
        from contextlib import contextmanager
        from torchvision import datasets
        import torch.distributed as dist
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank not in (-1, 0):
            dist.barrier()
        data = datasets.MNIST("data", download=True)
        if rank == 0:
            dist.barrier()
        @contextmanager
        def rank_zero_first():
            if rank != 0:
                dist.barrier()
            yield
            if rank == 0:
                dist.barrier()
        with rank_zero_first():
            test = datasets.MNIST("data", train=False, download=True)
        if rank == 0:
            datasets.CIFAR10("data", download=True)
        dist.barrier()
        train = datasets.CIFAR10("data", download=rank == 0)
    """),
    "the same calls in both branches, and groups": _started("""
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(loss, group=group)
            dist.broadcast(loss, 0, group)
        if rank == 0:
            dist.broadcast(a, 0)
        else:
            dist.broadcast(b, 0)
        if rank == 0:
            dist.send(a, 1)
        elif rank == 1:
            dist.recv(a, 0)
        dist.reduce(a, 0)
        if rank == 0:
            print(a)
        from functools import reduce
        if rank == 0:
            reduce(max, [1, 2])
            def late():
                dist.barrier()
        if world_size > 1:
            dist.barrier()
    """),
    "waits": _started("""
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        handles = []
        handles.append(dist.broadcast(a, 0, async_op=True))
        [handle.wait() for handle in handles]
        work = dist.all_reduce(loss, async_op=True)
        b = torch.ones(1) * 2
        work.wait()
        loss /= world_size
        def begin(tensor):
            return dist.all_reduce(tensor, async_op=True)
        begin(b).wait()
    """),
    "an evaluation": _started("""
        loader = DataLoader(test_set, batch_size=8, sampler=DistributedSampler(test_set, shuffle=False))
        whole = DataLoader(test_set, batch_size=8)
        own = DataLoader(test_set, batch_size=8, sampler=dist.DistributedEvalSampler(test_set))
        correct = torch.zeros(1)
        for epoch in range(3):
            model.eval()
            with torch.no_grad():
                for x, y in loader:
                    correct += (model(x) == y).sum()
                for x, y in whole:
                    model.module(x)
                for x, y in own:
                    model(x)
            dist.all_reduce(correct)
            print(correct / len(test_set))
        counted = DataLoader(test_set, batch_size=8, sampler=DistributedSampler(test_set))
        total = torch.zeros(2)
        with torch.no_grad():
            for x, y in counted:
                total += torch.tensor([float((model(x) == y).sum()), float(len(x))])
        dist.all_reduce(total)
        print(total[0] / total[1])
    """),
    "data that the script divides itself": _started("""
        part = torch.utils.data.Subset(train_set, range(rank, 800, world_size))
        parts = []
        for size in sizes:
            parts.append(train_set[:size])
        fourth = DataLoader(parts[rank], batch_size=8, shuffle=True)
        loader = DataLoader(part, batch_size=8, shuffle=True)
        noise = torch.utils.data.TensorDataset(torch.randn(64, 4))
        other = DataLoader(noise, batch_size=64 * world_size // world_size, shuffle=True)
        batch_size = 256 // world_size
        third = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set))
        for x, y in loader:
            model(x).sum().backward()
    """),
    "a checkpoint of the wrapper for the wrapper": _started("""
        if os.path.exists("model.pt"):
            model.load_state_dict(torch.load("model.pt", map_location=f"cuda:{os.environ['LOCAL_RANK']}"))
        if rank == 0:
            torch.save(model.state_dict(), "model.pt")
    """),
    "keywords in a dict": _started("""
        common = dict(num_workers=2)
        options = {"batch_size": 8, "sampler": DistributedSampler(train_set)}
        options.update(common, pin_memory=True)
        loader = DataLoader(train_set, **options)
        other = DataLoader(train_set, shuffle=True, **load_options())
        for x, y in loader:
            model(x).sum().backward()
    """),
    "loops that end together": _started("""
        loader = DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set))
        for step, (x, y) in enumerate(loader):
            if step >= 100:
                break
            loss = model(x).sum()
            loss.backward()
            stop = torch.tensor(float(loss < 0.1))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop.item() > 0:
                break
        for item in range(5):
            if rank == 0 and item == 3:
                break
        with dist.Join([model]):
            for x in range(10 + rank):
                model(x).sum().backward()
    """),
    "spawned processes": _script("""
        import os
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torchvision import datasets
        def setup(rank, world_size):
            os.environ["MASTER_ADDR"] = "localhost"
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
        def demo(rank, world_size):
            setup(rank, world_size)
            model = DDP(torch.nn.Linear(4, 1).to(rank), device_ids=[rank])
            if rank == 0:
                torch.save(model.state_dict(), "model.checkpoint")
            dist.barrier()
            map_location = {"cuda:%d" % 0: "cuda:%d" % rank}
            model.load_state_dict(torch.load("model.checkpoint", map_location=map_location))
            model(torch.randn(20, 4)).sum().backward()
            if rank == 0:
                os.remove("model.checkpoint")
            dist.destroy_process_group()
        def run(function, world_size):
            mp.spawn(function, args=(world_size,), nprocs=world_size, join=True)
        if __name__ == "__main__":
            datasets.MNIST("data", download=True)
            run(demo, torch.cuda.device_count())
            with open("log.txt", "w") as f:
                f.write("done")
    """),
    "two processes": _script("""
        import torch
        import torch.distributed as dist
        from multiprocessing import Process
        def run(rank, size):
            dist.init_process_group("gloo", rank=rank, world_size=size)
            if rank < 2:
                dist.all_reduce(torch.ones(1))
        if __name__ == "__main__":
            processes = []
            for rank in range(2):
                process = Process(target=run, args=(rank, 2))
                process.start()
                processes.append(process)
    """),
    "remote procedure calls": _script("""
        import torch
        import torch.distributed as dist
        import torch.distributed.rpc as rpc
        import torch.multiprocessing as mp
        def run(rank, size):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            if rank < 2:
                dist.init_process_group("gloo", rank=rank, world_size=2)
                dist.barrier()
            if rank == 2:
                with open("log.txt", "w") as f:
                    f.write("done")
            torch.save({}, "model.pt")
            rpc.shutdown()
        if __name__ == "__main__":
            mp.spawn(run, args=(3,), nprocs=3)
    """),
    "a function that a library calls on one rank": _script("""
        import os
        import torch
        from accelerate import Accelerator
        def main():
            accelerator = Accelerator()
            def save(models, weights, folder):
                torch.save(models[0].state_dict(), os.path.join(folder, "model.pth"))
            accelerator.register_save_state_pre_hook(save)
            for x in accelerator.prepare(load_data()):
                accelerator.backward(model(x).sum())
            if accelerator.is_main_process:
                accelerator.save_state("out")
        main()
    """),
    "a class with the name of a library's": _script("""
        from tools import Accelerator
        with Accelerator() as accelerator:
            with open("samples.csv", "w") as file:
                file.write("path")
    """),
    "a library that prepares nothing": _script("""
        import numpy as np
        from accelerate import Accelerator
        accelerator = Accelerator(mixed_precision="fp16")
        detector = create_detector(device="cuda:0")
        for number in range(10):
            np.savetxt(f"{number}.txt", detector.find(number))
    """),
    "a branch in one process": _script("""
        import argparse
        import numpy as np
        from accelerate import Accelerator
        parser = argparse.ArgumentParser()
        parser.add_argument("--several", action="store_true")
        args = parser.parse_args()
        if args.several:
            accelerator = Accelerator()
            for x in accelerator.prepare(load_data()):
                accelerator.backward(model(x).sum())
        else:
            np.save("out.npy", compute())
    """),
    "a function that saves on one rank": _script("""
        from accelerate import Accelerator
        accelerator = Accelerator()
        model = accelerator.prepare(create())
        accelerator.unwrap_model(model).save_pretrained("out", save_function=accelerator.save)
    """),
    "tests of types and sizes": _started("""
        loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set), drop_last=True)
        steps = 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            if isinstance(loss, float):
                continue
            if torch.isnan(loss):
                continue
            loss.backward()
            steps += 1
            if steps > 100 or x.shape[0] > 100 or x.numel() > 1000:
                break
    """),
    "the scores of a search": _started("""
        loader = DataLoader(test_set, 8, sampler=DistributedSampler(test_set))
        def score(mask):
            for x in loader:
                model(x * mask).sum().backward()
                mask = mask + mask.grad
            dist.all_reduce(mask)
            return mask
        mask = score(torch.ones(4, requires_grad=True))
        for _ in range(3):
            masked = mask.sort()[1]
            if len(masked) <= int(masked.numel() * 0.1):
                break
            mask = score(mask)
    """),
    "one process per GPU or several GPUs per process": _script("""
        import argparse
        import torch
        from torch.utils.data import DataLoader, DistributedSampler
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--no_cuda", action="store_true")
        args = parser.parse_args()
        if args.local_rank == -1 or args.no_cuda:
            args.n_gpu = torch.cuda.device_count()
        else:
            torch.cuda.set_device(args.local_rank)
            torch.distributed.init_process_group(backend="nccl")
            args.n_gpu = 1
        train_set = load_data()
        sampler = DistributedSampler(train_set)
        loader = DataLoader(train_set, sampler=sampler, batch_size=8 * max(1, args.n_gpu))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda())
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x in loader:
                model(x).sum().backward()
    """),
    "the state of a scheduler": _started("""
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        scheduler.load_state_dict(torch.load(os.path.join("checkpoint", "scheduler.pt")))
    """),
    "a range in place of samples": _started("""
        loader = DataLoader(range(32), collate_fn=lambda numbers: batches[numbers[0]])
        for x in loader:
            model(x).sum().backward()
    """),
    "a library that prepares the loaders": _script("""
        import torch
        from accelerate import Accelerator
        from torch.utils.data import DataLoader
        def main():
            accelerator = Accelerator()
            loader = DataLoader(load_data(), shuffle=True, batch_size=8)
            model, loader = accelerator.prepare(torch.nn.Linear(4, 1), loader)
            for x in loader:
                accelerator.backward(model(x).sum())
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                torch.save({}, "model.pt")
            accelerator.unwrap_model(model).save_pretrained("out", is_main_process=accelerator.is_main_process)
        main()
    """),
}
