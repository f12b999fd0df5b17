"""Engines that wrap PyTorch's process groups: `nccl` and its counterparts for other accelerators, and `gloo`.

May use: `adapters`, the files in `engine` itself, and `store`. `process_groups.py` constructs process groups
independently of torch.distributed's groups, and `collectives.py` translates each call into a process-group operation.
Start reading at `device_engine.py`. On a device, `device_calls.py` runs and monitors calls in stream order, and
`peers.py` finds missing ranks. On the CPU, `gloo.py` runs calls one at a time.
"""
