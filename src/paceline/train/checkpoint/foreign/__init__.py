"""Reads checkpoints that other libraries wrote with torch.save, torch.distributed.checkpoint or safetensors.

No file is trusted: the unpicklers for these files create only tensors and plain values.

May use: `format`, the `pytree` module in the parent folder, and torch. Start reading at `foreign_file.py`.
"""
