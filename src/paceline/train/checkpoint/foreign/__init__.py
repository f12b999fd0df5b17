"""Reads what others saved: files of torch.save, directories of torch.distributed.checkpoint, safetensors files.

Nothing of it is trusted: pickles are read by unpicklers that know tensors and plain values, and nothing else.

May use: `format` and torch. Start reading at `opening.py`, and at `state.py`, what is read.
"""
