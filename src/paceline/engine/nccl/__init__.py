"""The nccl engine: CUDA tensors, by the NCCL library that torch brings or the system has.

A call becomes NCCL calls (`plan.py`), which `call_stream.py` puts into a CUDA stream of its own. `watch.py` aborts
those that would never end. `loader.py` finds the library, `functions.py` declares its functions, and
`communicator.py` calls them. Only `device.py` knows CUDA.

May use: the files of `engine` itself and `store`. Start reading at `engine.py`.
"""
