"""Samplers and loaders, which distribute the samples of a dataset over ranks.

May use: `paceline.comm`. Start reading at `sampler.py`. `loader.py` has the loader that can resume in mid-epoch,
`batches.py` its batches of indexable datasets and of streams, `stream_reader.py` the reader of a stream, and
`epoch_order.py` the rules for all of them.
"""
