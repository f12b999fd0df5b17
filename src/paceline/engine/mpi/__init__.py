"""The mpi engine: any MPI library through mpi4py.

May use what `engine` may. `world.py` starts the library, `meeting.py` lets the ranks that mpirun started find each
other, `channel.py` runs collectives, `messages.py` sends and receives, `types.py` has the library's types and
reductions. Start reading at `world.py`.
"""

from paceline.engine.mpi.world import MpiEngine, missing_piece, start

__all__ = ["MpiEngine", "missing_piece", "start"]
