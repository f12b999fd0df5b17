"""Groups for tensors on accelerators whose data travels through host memory, over the engine for CPU tensors.

A call is divided into chunks, which are copied to pinned host memory, reduced or exchanged there, and copied back.
It is what a backend without an engine for the device uses, so that no other library is needed.

May use: `adapters`, and below `engine`. Start reading at `channel.py`.
"""
