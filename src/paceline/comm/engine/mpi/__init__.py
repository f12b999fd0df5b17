"""The mpi engine, which supports any MPI library through mpi4py.

May use: the files in `engine` itself, `engine/adapters`, `rendezvous`, `security`, `store`. Start reading at
`engine.py`, which runs collectives and messages and implements the rendezvous of ranks started by mpirun; `library.py`
loads MPI, waits for MPI requests and maps dtypes and reductions.
"""
