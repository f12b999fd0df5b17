"""What a checkpoint is on disk, and how it becomes visible at once and survives the loss of power. It knows no torch.

A *root* is a directory of checkpoints; each is a directory with safetensors files and a manifest, which says which
bytes of which file are which part of which tensor. Start reading at `manifest.py`; `saving.py` writes, `reading.py`
finds and `checkpoint.py` reads one. All that touches a disk goes through a place (`places.py`).

May use: `errors`, and the failpoints of `elastic`. The command and the launcher may use it, so it imports no torch.
"""
