"""The mpi engine, which uses any MPI library through mpi4py.

May use: the files of `engine` itself, `engine/adapters`, `rendezvous`, `security`, `store`. Start reading at
`engine.py`, which also has the rendezvous of ranks that mpirun started; `channel.py` runs collectives and messages, and
`library.py` loads MPI, waits for its requests and maps dtypes and reductions.
"""
