"""Notices what spoils a training without an error: gradients that are not finite, and replicas that differ.

Who averages gradients shows them to `GradientCheck` before and after, and asks `ReplicaCheck` to compare the replicas.

May use: `group` and below, and the other modules of `parallel`. Start reading at `gradients.py` and `replicas.py`;
`findings.py` and `verdict.py` hold the decisions and texts, `pace.py` how often something is looked at.
"""
