"""Training scripts with one mistake each, on the line that ends in `# !`."""

from __future__ import annotations

from textwrap import dedent


def script(text: str) -> str:
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


def started(text: str) -> str:
    return _START.lstrip() + script(text)


RANK_MISTAKES: dict[str, list[str]] = {
    "no-main-guard": [
        script("""
            import torch.distributed as dist
            from torch.utils.data import DataLoader
            from torch.utils.data.distributed import DistributedSampler
            dist.init_process_group("gloo")
            data = list(range(100))
            sampler = DistributedSampler(data)
            loader = DataLoader(data, 8, sampler=sampler, num_workers=2, multiprocessing_context="spawn")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                for batch in loader:  # !
                    print(batch)
        """),
        script("""
            import torch.multiprocessing as mp
            import torch.distributed as dist
            def work(rank):
                dist.init_process_group("gloo", rank=rank, world_size=2)
            mp.spawn(work, nprocs=2)  # !
        """),
        script("""
            import paceline as dist
            def work(rank):
                dist.init_process_group()
            def main():
                dist.spawn(work, nprocs=2)  # !
            main()
        """),
        script("""
            import torch.multiprocessing as mp
            import torch.distributed as dist
            def work(rank, size):
                dist.init_process_group("gloo", rank=rank, world_size=size)
            mp.set_start_method("spawn")
            processes = [mp.Process(target=work, args=(rank, 2)) for rank in range(2)]  # !
            for process in processes:
                process.start()
        """),
        script("""
            from torch import multiprocessing as mp
            import torch.distributed as dist
            def run(rank):
                dist.init_process_group('gloo', rank=rank, world_size=2)
            ctx = mp.get_context('spawn')
            ps = [ctx.Process(target=run, args=(r,)) for r in range(2)]  # !
            [p.start() for p in ps]
        """),
        script("""
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
        script("""
            import paceline as dist
            if __name__ == "__main__":
                dist.spawn(lambda rank: dist.init_process_group(), nprocs=2)  # !
        """),
        script("""
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
        started("""
            from torch.distributed.optim import ZeroRedundancyOptimizer
            sharded = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1,
                parameters_as_bucket_view=True, overlap_with_ddp=False,
            )
            if rank == 0:
                sharded.consolidate_state_dict(to=0)  # !
        """),
        script("""
            import torch
            import torch.distributed as dist
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            dist.init_process_group("nccl")
            model = FSDP(torch.nn.Linear(64, 64))
            if dist.get_rank() == 0:
                state = model.state_dict()  # !
                torch.save(state, "model.pt")
        """),
        started("if rank == 0:\n    dist.all_reduce(loss)  # !"),
        started("if rank < 2:\n    dist.all_reduce(torch.ones(1))  # !"),
        started("if rank in (0, 1):\n    dist.barrier()  # !"),
        started("if not rank:\n    dist.broadcast(loss, 0)  # !"),
        started("if rank % 2 == 0:\n    group = dist.new_group([0, 2, 4])  # !"),
        started("if rank < 2:\n    group = dist.new_group([0, 1])  # !"),
        started("is_main = rank == 0\nif is_main and os.path.exists('x'):\n    dist.barrier()  # !"),
        started("rank == 0 and dist.barrier()  # !"),
        started("def evaluate():\n    dist.all_reduce(loss)  # !\nif rank == 0:\n    evaluate()"),
        started("def log():\n    if rank != 0:\n        return\n    dist.barrier()  # !\nlog()"),
        started("if rank != world_size - 1:\n    dist.all_gather_object(xs, rank)  # !"),
        started("if int(os.environ['LOCAL_RANK']) == 0:\n    dist.barrier()  # !"),
        script("""
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
        script("""
            import horovod.torch as hvd
            hvd.init()
            if hvd.rank() == 0:
                hvd.allreduce(loss)  # !
        """),
        script("""
            import sys
            import torch.distributed as dist
            dist.init_process_group("gloo")
            if dist.get_rank() > 0:
                sys.exit(0)
            dist.barrier()  # !
        """),
        started("loss = model(x).sum()\nif rank == 0:\n    loss.backward()  # !"),
        started("if rank == 0:\n    model2 = dist.DistributedDataParallel(nn.Linear(1, 1))  # !"),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            loss = torch.rand(1)
            if loss.item() > 0.5:
                dist.all_reduce(loss)  # !
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            ranks=[0, 1]
            if dist.get_rank() in ranks:
                g = dist.new_group(ranks)  # !
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            if dist.get_rank() == 0:
                print(1)
            else:
                dist.barrier()  # !
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            x = torch.ones(1)
            y = dist.all_reduce(x) if dist.get_rank() == 0 else None  # !
        """),
        script("""
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
        script("""
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
        script("""
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
        started("""
            if rank == 0:
                dist.broadcast(a, 0)  # !
                dist.all_reduce(b)
            else:
                dist.all_reduce(b)
                dist.broadcast(a, 0)
        """),
    ],
    "different-group": [
        started("""
            half = world_size // 2
            if rank < half:
                group = dist.new_group(list(range(half)))  # !
            else:
                group = dist.new_group(list(range(half, world_size)))
        """),
        started("pair = dist.new_group([rank, rank ^ 1])  # !"),
    ],
    "same-output": [
        started("outputs = [torch.zeros(4)] * world_size\ndist.all_gather(outputs, torch.ones(4))  # !"),
        started("dist.gather(loss, [torch.empty_like(loss)] * world_size if rank == 0 else None, dst=0)  # !"),
    ],
    "receive-deadlock": [
        script("""
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
        started("dist.recv(loss, (rank - 1) % world_size)  # !\ndist.send(loss, (rank + 1) % world_size)"),
    ],
    "different-root": [
        started("dist.broadcast(loss, src=rank)  # !"),
        started("dist.broadcast_object_list(objects, dist.get_rank())  # !"),
    ],
    "message-to-itself": [started("if rank == 0:\n    dist.send(loss, 0)  # !")],
    "no-receiver": [started("if rank == 0:\n    dist.send(loss, 1)  # !")],
    "uneven-loop": [
        started("""
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
        started("for _ in range(rank + 1):  # !\n    dist.all_reduce(loss)"),
        started("""
            loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set))
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                if loss.item() < 0.1:
                    break  # !
        """),
        started("""
            for step in range(100):
                if rank == 1 and step == 5:
                    break  # !
                dist.all_reduce(torch.ones(1))
        """),
        started("""
            import time
            begin = time.time()
            while True:
                model(x).sum().backward()
                if time.time() - begin > 60:
                    break  # !
        """),
        started("""
            def train(loader):
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x), y)
                    if loss > 10:
                        continue  # !
                    loss.backward()
            train(DataLoader(train_set, 8, sampler=DistributedSampler(train_set)))
        """),
        started("""
            for step, (x, y) in enumerate(DataLoader(train_set, sampler=DistributedSampler(train_set))):
                if step >= 100 - rank:
                    break  # !
                model(x).sum().backward()
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            steps = 10 if dist.get_rank() == 0 else 12
            for _ in range(steps):  # !
                dist.all_reduce(torch.ones(1))
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
            loss = torch.tensor(1.0)
            while loss > 0.1:  # !
                loss = model(torch.randn(8, 4)).pow(2).mean()
                loss.backward()
        """),
        script("""
            import random
            import torch
            import paceline as dist
            dist.init_process_group()
            for i in range(100):
                if random.random() < 0.1:
                    break  # !
                dist.barrier()
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            rank=dist.get_rank()
            for i in range(10):
                if i == 5 + rank:
                    break  # !
                dist.barrier()
        """),
        script("""
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
        started("torch.save(model.module.state_dict(), 'model.pt')  # !"),
        started(
            "for epoch in range(9):\n    if epoch % 3 == 0:\n        torch.save(optimizer.state_dict(), 'o.pt')  # !"
        ),
        started("with open('log.txt', 'w') as f:  # !\n    f.write('done')"),
        started("log = open(os.path.join('out', 'log.txt'), mode='w')  # !"),
        started("if rank != 0:\n    torch.save(optimizer.state_dict(), 'o.pt')  # !"),
        started("model.module.save_pretrained('out')  # !"),
        started("from pathlib import Path\nPath('metrics.json').write_text('{}')  # !"),
        started("import numpy as np\nnp.save('out.npy', [1])  # !"),
        script("""
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
        script("""
            import logging
            import paceline as dist
            dist.init_process_group()
            logging.basicConfig(filename='train.log', filemode='w')  # !
            logging.info('x')
        """),
        script("""
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
    "all-ranks-mkdir": [started("os.makedirs('out')  # !"), started("os.mkdir('out')  # !")],
    "all-ranks-download": [
        started("from torchvision import datasets\nd = datasets.MNIST('data', train=True, download=True)  # !"),
        started("import urllib.request\nurllib.request.urlretrieve(url, 'data.zip')  # !"),
        started("os.system('wget https://example.org/data.zip')  # !"),
        script("""
            import torchvision
            import paceline as dist
            dist.init_process_group()
            train = torchvision.datasets.CIFAR10('data', True, download=True)  # !
        """),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            torch.hub.download_url_to_file('https://x/y.pt', 'y.pt')  # !
        """),
        script("""
            from urllib.request import urlretrieve
            import os
            import paceline as dist
            dist.init_process_group()
            if not os.path.exists('y.pt'):
                urlretrieve('https://x/y.pt', 'y.pt')  # !
        """),
        script("""
            import torchvision
            import paceline as dist
            train = torchvision.datasets.CIFAR10('data', True, download=True)  # !
            dist.init_process_group()
        """),
    ],
    "no-wait": [
        started("dist.all_reduce(loss, async_op=True)  # !\nprint(loss)"),
        started("work = dist.broadcast(loss, 0, async_op=True)  # !"),
        started("if rank == 0:\n    dist.isend(loss, 1)  # !\nelse:\n    dist.recv(loss, 0)"),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            handles=[]
            for p in model.parameters():
                handles.append(dist.all_reduce(p.grad, async_op=True))  # !
            optimizer.step()
        """),
        script("""
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
        started("work = dist.all_reduce(loss, async_op=True)\nloss /= world_size  # !\nwork.wait()"),
        started("work = dist.all_reduce(loss, async_op=True)\nprint(loss.item())  # !\nwork.wait()"),
    ],
    "before-init": [
        script("""
            import torch
            import paceline as dist
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))  # !
            dist.init_process_group()
        """),
        script("""
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
        script("""
            import torch.distributed as dist
            rank = dist.get_rank()  # !
            dist.init_process_group("gloo")
        """),
        script("""
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
        started("model.module.head = nn.Linear(4, 10)  # !"),
        started("model.module[0] = nn.Linear(4, 10)  # !"),
        started("model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # !"),
        started("model.module.add_module('head', nn.Linear(4, 10))  # !"),
        script("""
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
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4)))
            model.fc = torch.nn.Linear(4, 2)  # !
        """),
        script("""
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
        script("""
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
        started("model.module(x).sum().backward()  # !"),
        script("""
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
        script("""
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
        started("""
            for x in train_set:
                with model.no_sync():
                    model(x).sum().backward()  # !
                optimizer.step()
        """),
    ],
    "different-split": [
        started("""
            torch.manual_seed(42 + rank)
            kept, rest = torch.utils.data.random_split(train_set, [80, 20])
            sampler = DistributedSampler(kept, shuffle=False)  # !
            loader = DataLoader(kept, batch_size=8, sampler=sampler)
        """),
    ],
    "wrapped-state-dict": [
        started("if rank == 0:\n    torch.save(model.state_dict(), 'model.pt')  # !"),
        started("state = {'model': model.state_dict(), 'epoch': 1}\nif rank == 0:\n    torch.save(state, 'm.pt')  # !"),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
            if dist.get_rank() == 0:
                torch.save(model, 'model.pt')  # !
        """),
    ],
    "no-sampler": [
        started("loader = DataLoader(train_set, batch_size=8, shuffle=True)  # !"),
        started("loader = DataLoader(train_set, 8)  # !\nfor x, y in loader:\n    model(x).sum().backward()"),
        started("""
            from torchvision.datasets import FakeData
            def train(loader):
                for x, y in loader:
                    model(x).sum().backward()
            train(DataLoader(FakeData(), 8, num_workers=2, multiprocessing_context="fork"))  # !
        """),
    ],
    "shuffle": [
        started("""
            options = {"sampler": DistributedSampler(train_set)}
            options["shuffle"] = True
            loader = DataLoader(train_set, **options)  # !
        """),
        started("s = DistributedSampler(train_set)\nloader = DataLoader(train_set, sampler=s, shuffle=True)  # !"),
    ],
    "no-set-epoch": [
        started("""
            sampler = DistributedSampler(train_set)  # !
            loader = DataLoader(train_set, sampler=sampler)
            for epoch in range(3):
                for x, y in loader:
                    model(x).sum().backward()
        """),
        started("""
            loader = DataLoader(train_set, sampler=DistributedSampler(train_set, seed=1))  # !
            def train():
                for x, y in loader:
                    pass
            for epoch in range(3):
                train()
        """),
        script("""
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
        started("""
            loader = DataLoader(test_set, sampler=DistributedSampler(test_set))  # !
            correct = torch.zeros(1)
            with torch.no_grad():
                for x, y in loader:
                    correct += (model(x) == y).sum()
            dist.all_reduce(correct)
            print(correct.item() / len(loader.dataset))
        """),
        script("""
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
        started("""
            sampler = DistributedSampler(train_set)
            loader = DataLoader(test_set, sampler=sampler)  # !
            model.eval()
            for x, y in loader:
                correct = model(x) == y
        """),
        script("""
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
        started(
            "s = DistributedSampler(train_set)\nloader = DataLoader(train_set, batch_size=8 * world_size, sampler=s)"
            "  # !"
        ),
        started("""
            batch_size = 8
            batch_size *= dist.get_world_size()
            s = DistributedSampler(train_set)
            loader = DataLoader(train_set, batch_size, sampler=s)  # !
        """),
        started("""
            import argparse
            args = argparse.ArgumentParser().parse_args()
            s = DistributedSampler(train_set)
            loader = DataLoader(train_set, batch_size=args.batch * world_size, sampler=s)  # !
        """),
        script("""
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
        started("model.module.load_state_dict(torch.load('model.pt'))  # !"),
        started("checkpoint = torch.load('model.pt')  # !"),
    ],
    "first-gpu": [
        started("model.to('cuda:0')  # !"),
        started("device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')  # !"),
        started("x = torch.zeros(4, device='cuda:0')  # !"),
        started("model.cuda(0)  # !"),
        script(
            "import torch\nimport paceline as dist\ndist.init_process_group()\nnet = torch.nn.Linear(4, 1).cuda()  # !"
        ),
        script("import torch\nimport paceline as dist\ndist.init_process_group()\nmodel.to('cuda')  # !"),
        script("import torch\nimport paceline as dist\ndist.init_process_group()\ntorch.cuda.set_device(0)  # !"),
        script("""
            import torch
            import paceline as dist
            dist.init_process_group()
            model = dist.DistributedDataParallel(net, device_ids=[0])  # !
        """),
    ],
    "rank-as-gpu": [
        started("other = dist.DistributedDataParallel(model, device_ids=[dist.get_rank()])  # !"),
        started("torch.cuda.set_device(rank)  # !"),
    ],
    "late-visible-devices": [
        started("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']  # !"),
    ],
}
"""By rule of `training_rules.py`."""
