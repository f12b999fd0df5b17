"""The nccl engine for CUDA tensors, which uses the NCCL library that comes with torch or the system's.

A call becomes NCCL calls (`plan.py`), which `call_stream.py` enqueues on a CUDA stream of its own. `watch.py` aborts
calls that would never end. `loader.py` finds the library, `functions.py` declares its functions, and
`communicator.py` calls them. Only `device.py` knows CUDA.

May use: the files of `engine` itself and `store`. Start reading at `engine.py`.
"""
