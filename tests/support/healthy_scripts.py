"""Correct training scripts, in which the doctor must find no mistakes."""

from __future__ import annotations

from planted_mistakes import script, started

HEALTHY: dict[str, str] = {
    "a wrapper that an option chooses": script("""
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
    "files that the ranks write in turns": started("""
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
    "a function that returns its first result again": started("""
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
    "a script for one machine": script("""
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
    "an imported function that selects the GPU": script("""
        import torch
        import torch.distributed as dist
        from project import utils
        device = utils.get_device()
        dist.init_process_group("nccl")
        mask = torch.zeros(4, device="cuda")
    """),
    "an imported function that connects the ranks": script("""
        import torch
        from distributed import init_distributed
        init_distributed(rank, world_size, backend="nccl")
        model = torch.nn.Linear(4, 1).cuda()
    """),
    "ranks that share a GPU through an option's default": script("""
        import argparse
        import torch
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--backend", default="gloo")
        args = parser.parse_args()
        dist.init_process_group(args.backend)
        model = torch.nn.Linear(4, 1).to("cuda")
    """),
    "an output file for each command": script("""
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
    "a file named after a result of this rank": script("""
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        model, loader = accelerator.prepare(torch.nn.Linear(4, 1), load_data())
        total = 0.0
        for x in loader:
            total += model(x).sum().item()
        torch.save(accelerator.unwrap_model(model).state_dict(), f"loss{total:.4f}.pt")
    """),
    "gradients that a hook averages": script("""
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
    "a model that may be wrapped": script("""
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
    "a GPU that DeepSpeed selects": script("""
        import deepspeed
        import torch
        deepspeed.init_distributed()
        loss = torch.nn.CrossEntropyLoss().cuda()
        model, optimizer, loader, _ = deepspeed.initialize(model=torch.nn.Linear(4, 1), training_data=load_data())
    """),
    "a checkpoint of every rank": started("""
        optimizer.load_state_dict(torch.load(path + "_optimizer_{}.pt".format(rank)))
    """),
    "a script that is edited for each rank": script("""
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
    "a rank that is the local rank": script("""
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
    "a model that a second test unwraps": script("""
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
    "a rank that asks again": started("""
        while True:
            if rank == 0:
                text = input()
                if not text:
                    continue
            objects = [text] if rank == 0 else [None]
            dist.broadcast_object_list(objects, src=0)
    """),
    "a command that the processes never run": script("""
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
    "a tool in a module of a training": script("""
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
    "a program that a library starts": script("""
        import urllib.request
        import torch.distributed as dist
        from project import distributed_utils
        def evaluate():
            print(dist.get_rank())
        if __name__ == "__main__":
            urllib.request.urlretrieve("https://example.org/data", "data")
            distributed_utils.call_main(evaluate)
    """),
    "a loss that ends the job": started("""
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
    "a second loader that is not used": started("""
        sampler = DistributedSampler(train_set, shuffle=False)
        loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        other = DataLoader(train_set, batch_size=8, shuffle=True)
        for x, y in loader:
            model(x).sum().backward()
    """),
    "a rank that uses all GPUs of its machine": script("""
        import torch
        import torch.distributed as dist
        dist.init_process_group("nccl")
        tensors = []
        for index in range(torch.cuda.device_count()):
            tensors.append(torch.ones(1).cuda(index))
    """),
    "an exported model": started("""
        if rank == 0:
            torch.onnx.export(model, (x,), "model.onnx")
    """),
    "files that exist before the processes start": script("""
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
    "counters": started("""
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
    "groups, messages and gradients": started("""
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
    "a script in one process": script("""
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
    "everything": started("""
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
    "the local rank as GPU": script("""
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
    "optional ranks": script("""
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
    "a guard at the call, in a method, by a return and by an exit": script("""
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
    "a download on rank 0 first": script("""
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
    "the same calls in both branches, and groups": started("""
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
    "waits": started("""
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
    "an evaluation": started("""
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
    "data that the script divides itself": started("""
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
    "a checkpoint of the wrapper for the wrapper": started("""
        if os.path.exists("model.pt"):
            model.load_state_dict(torch.load("model.pt", map_location=f"cuda:{os.environ['LOCAL_RANK']}"))
        if rank == 0:
            torch.save(model.state_dict(), "model.pt")
    """),
    "keywords in a dict": started("""
        common = dict(prefetch_factor=2)
        options = {"batch_size": 8, "sampler": DistributedSampler(train_set)}
        options.update(common, pin_memory=True)
        loader = DataLoader(train_set, **options)
        other = DataLoader(train_set, shuffle=True, **load_options())
        for x, y in loader:
            model(x).sum().backward()
    """),
    "loops that end together": started("""
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
    "spawned processes": script("""
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
    "two processes": script("""
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
    "remote procedure calls": script("""
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
    "a function that a library calls on one rank": script("""
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
    "a class with the name of a library's": script("""
        from tools import Accelerator
        with Accelerator() as accelerator:
            with open("samples.csv", "w") as file:
                file.write("path")
    """),
    "a library that prepares nothing": script("""
        import numpy as np
        from accelerate import Accelerator
        accelerator = Accelerator(mixed_precision="fp16")
        detector = create_detector(device="cuda:0")
        for number in range(10):
            np.savetxt(f"{number}.txt", detector.find(number))
    """),
    "a branch in one process": script("""
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
    "a function that saves on one rank": script("""
        from accelerate import Accelerator
        accelerator = Accelerator()
        model = accelerator.prepare(create())
        accelerator.unwrap_model(model).save_pretrained("out", save_function=accelerator.save)
    """),
    "tests of types and sizes": started("""
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
    "the scores of a search": started("""
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
    "one process per GPU or several GPUs per process": script("""
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
    "the state of a scheduler": started("""
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        scheduler.load_state_dict(torch.load(os.path.join("checkpoint", "scheduler.pt")))
    """),
    "a range in place of samples": started("""
        loader = DataLoader(range(32), collate_fn=lambda numbers: batches[numbers[0]])
        for x in loader:
            model(x).sum().backward()
    """),
    "a split of random tensors that a generator determines": script("""
        import torch
        import paceline as dist
        dist.init_process_group()
        samples = torch.utils.data.TensorDataset(torch.randn(100, 4))
        kept, rest = torch.utils.data.random_split(samples, [80, 20], generator=torch.Generator().manual_seed(1))
        sampler = dist.DistributedSampler(kept)
        loader = torch.utils.data.DataLoader(kept, batch_size=8, sampler=sampler)
        model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for (x,) in loader:
                model(x).sum().backward()
    """),
    "a library that prepares the loaders": script("""
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
