"""The format of checkpoints on disk, which become visible atomically and survive the loss of power. Imports no torch.

A *root* is a directory of checkpoints; each checkpoint is a directory with safetensors files and a manifest, which maps
regions of tensors to bytes of files. `part_writer.py` writes the files of a rank, `root.py` begins, publishes and
removes checkpoints, and `checkpoint.py` reads them. All access to a disk goes through a `Storage` (`storage.py`).

May use: `errors`, and the failpoints of `elastic`. The command and the launcher may use it, so it imports no torch.
Start reading at `manifest.py`.
"""
