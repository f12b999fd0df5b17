"""Groups for accelerator tensors whose data travels through host memory, over the engine for CPU tensors.

A call is divided into chunks, which are copied to pinned host memory, reduced or exchanged there, and copied back.
Backends without an engine for the device use these groups, so no other library is needed.

May use: `adapters`, and below `engine`. Start reading at `channel.py`.
"""
