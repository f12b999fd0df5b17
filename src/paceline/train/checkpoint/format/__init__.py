"""The on-disk format of checkpoints, which become visible atomically and survive a power loss.

A *root* is a directory that contains checkpoints. Each checkpoint is a directory with safetensors files and a manifest,
which maps tensor regions to bytes in the files. `part_writer.py` writes the files of a rank, `root.py` begins,
publishes and removes checkpoints, and `checkpoint.py` reads them. All disk access goes through a `Storage`
(`storage.py`).

May use: `errors`, and the failpoints of `elastic`. The command line and the launcher import this package, so it must
not import torch. Start reading at `manifest.py`.
"""
