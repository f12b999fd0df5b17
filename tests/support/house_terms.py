"""Standard terms in which the names of classes and folders may end; docs/glossary.md defines Paceline's own."""

from __future__ import annotations

TERMS = {
    "PyTorch and its libraries": """
        agent agreement autograd averager backend barrier batch batch_norm bucket buffer checkpoint checks co
        codec collate collectives compression compressor dash dashboard data dataset ddp device diloco
        distributed dtype elastic embedding engine epoch forward function functional future gradient group hook
        horovod index indices integrations item join joinable layout leaf linear lion loader loop loss mean mesh
        methods microbatch middleware module norm normalize optimizer parallel parallelize parameter partition
        pipeline process reducer ref replica sampler scaler schedule scheduler sgd shard sharding slice spec
        stage staging state stateful step storage strategy stream style tensor top torch train trainer transfer
        unpickler work weight world wrapper zero""",
    "MPI, NCCL and gloo": """
        adapters all allgather allreduce alltoall block broadcast channel collective comm communicator count
        datatype envelope exchange gather gloo id interop member message mpi native nccl op operation packing
        pair participant peer point rank reduce reducescatter reduction rendezvous request ring root scatter set
        single status subgroup sum topology transport tree type wait window""",
    "Kubernetes, etcd and Raft": """
        admission ballot chaos claim cluster commit config controller coordinator health heartbeat host job
        launch launcher leader lease log membership metric monitor node operate policy pool probe quorum record
        registry replacement replicated replication resource run snapshot store task template term view vote
        watch watchdog worker""",
    "Linux, POSIX, TCP and TLS": """
        access address cache cgroup cleanup client clock close collector column command connection console cpu
        delay descriptor destination dialer digest directory disconnect disk edit editor endpoint entry event
        end exit file flag flight follower forker formatter forwarder frame handle handshake head header hello
        identity inbox input interface interpreter interval keyboard library limit line link listener lock
        mailbox memory miss mode multinode multiplexer name namespace network offset output packer parser path
        payload plan port priority protocol queue rate reader receiver relay router row sample screen script
        secret security sender server session shared signal sink socket source splitter ssh static
        statistics stats stdin stop subcommand summary table tail target terminal text thread time timeout token tracker
        traffic unpacker user writer""",
    "Python": """
        array bytes cli code context cst error exception executor format global iterator main mark migrate
        object paceline range span stack test trace value""",
    "Programming in general": """
        action activity advice aggregator algorithm announcer assigner assignment attempt axis background base
        broadcaster budget call case cause change check choice collection condition confidence content contents control
        copy cost countdown counter curve debugger decision diagnosis diagnostic diagram difference direction dispatcher
        execution fact failure feed figure finish flat follow foreign form formation guard history info kind list
        load location manager map measure measurement method mismatch model note numbering numbers option order
        origin outcome pause phase position prediction prefixer printer program progress read reason recorder
        reply report reporter requirement response restorer result rule runner search sequence setting severity
        signature size slot split stand_in start structure threshold timeline timer timing update usage use
        verifier viewer write""",
}
"""Words from the documentation of other projects, with the same meaning, allowed as the last word of a name."""

GERUNDS = {
    "halving_doubling": "the name of the algorithm",
    "ring": "a noun",
    "lightning": "the library",
    "finding": "a noun",
    "recording": "a noun",
    "formatting": "a noun",
}
"""Modules whose names may end in -ing."""

PERSONS_WORDS = """
    ask asks asked come comes came everybody everyone hear hears heard know knows knew knowledge learn learns learned
    mood news say says said seat seats story stray strays talk talks tell tells told"""
"""Words that suit persons and not processes; no name in the sources has them."""
