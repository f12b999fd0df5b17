"""An endless training run for tests of the live page. If a path is given, rank 1 blocks once that file exists."""

TRAIN = """
import os, sys, time, torch
import paceline as dist

dist.init_process_group()
model = dist.DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
dist.log(total_steps=100000)
print("<b>begun</b>", flush=True)
step = 0
while True:
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.log(loss=1.0 / (step + 1), samples=8)
    step += 1
    if sys.argv[1:] and dist.get_rank() == 1 and os.path.exists(sys.argv[1]):
        time.sleep(600)
    time.sleep(0.02)
"""
