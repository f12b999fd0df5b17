"""The nccl engine for CUDA tensors, which uses the NCCL library of torch or of the system.

May use: the files of `engine` itself and `store`. Start reading at `engine.py`. A call becomes NCCL calls (`plan.py`),
which `call_stream.py` enqueues on a CUDA stream of its own and aborts if they cannot complete. `library.py` finds NCCL
and declares its functions, `communicator.py` calls them, and only `device.py` uses CUDA.
"""
