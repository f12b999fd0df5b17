"""Samplers and loaders, which distribute the samples of a dataset over ranks.

May use: `paceline.comm`. Start reading at `sampler.py`. `loader.py` has the loader that can resume in mid-epoch,
`batches.py` its batches of indexable datasets and of streams, `stream_reader.py` the reading of a stream, and
`epoch_order.py` the rules that all of them follow.
"""
