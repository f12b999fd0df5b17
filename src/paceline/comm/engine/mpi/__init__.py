"""The mpi engine, which uses any MPI library through mpi4py.

`meeting.py` lets the ranks that mpirun started find each other, `channel.py` runs collectives, `messages.py` sends and
receives, `types.py` maps types and reductions; all rest on `library.py`, which loads and initialises MPI.

May use: the files of `engine` itself, `engine/adapters`, `rendezvous`, `security`, `store`. Start reading
at `engine.py`.
"""
