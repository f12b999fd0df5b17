"""Groups that stage accelerator tensors through host memory and use the engine for CPU tensors.

A call is divided into chunks, which are copied to pinned host memory, reduced or exchanged there, and copied back.
Backends without an engine for the device use these groups, which require no other library.

May use: `adapters`, and the layers below `engine`. Start reading at `channel.py`.
"""
