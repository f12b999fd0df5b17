"""Data parallel training: DistributedDataParallel (`ddp/`), ZeRO (`zero/`), logical shards (`sharded/`), DataParallel.

May use: `group` and below. Start reading at `ddp/module.py`. What several of them use is in this folder itself:
`agreement.py` and `conditions.py` check a module before it is wrapped, `graph.py` looks at autograd's graph.
`one_copy/` is one copy of a model for all ranks of a host, `tensor/` and `pipeline/` divide models that do not fit, and
`local/` is for ranks that average only now and then.
"""
