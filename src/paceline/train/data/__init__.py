"""Samplers and loaders that distribute a dataset's samples over ranks.

May use: `paceline.comm`. Start reading at `sampler.py`. `loader.py` contains a loader that can resume in the middle of
an epoch. `batches.py` reads batches from indexable datasets and streams, and `epoch_order.py` defines the order and
division of samples.
"""
