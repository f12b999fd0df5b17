"""Engines that wrap PyTorch's process groups: `nccl` and those of other accelerators, and `gloo` for CPU tensors.

May use: `adapters`, the files of `engine` itself, and `store`. `process_groups.py` constructs a process group without
torch.distributed's own groups, and `collectives.py` translates a call into one of its operations. On the CPU, `gloo.py`
runs calls one at a time. Start reading at `device_engine.py`: on a device, `device_calls.py` runs calls in stream order
and watches them, and `peers.py` finds missing ranks.
"""
