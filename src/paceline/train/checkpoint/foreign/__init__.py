"""Reads checkpoints of other libraries: files of torch.save, directories of torch.distributed.checkpoint, safetensors.

No file is trusted: pickles are read by unpicklers that build tensors and plain values, and nothing else.

May use: `format`, the `pytree` module beside it and torch. Start reading at `foreign_file.py`.
"""
