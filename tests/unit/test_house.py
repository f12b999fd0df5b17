"""The house stays one that a newcomer can live in: files of a readable size, unique names, and known words.

CONTRIBUTING.md has the habits that these checks keep.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from house_terms import AWAITING_A_NAME, GERUNDS, TERMS

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
STAND_IN = SOURCES / "paceline" / "interop" / "horovod" / "stand_in" / "horovod"
"""Named as Horovod names its own files and classes."""

MOST_FILES = 430
LONGEST_FILE = 1200
RELATIVE = re.compile(r"(What|How|Which|Where|Who|Whose|When|Why)\b")
WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z\d]*|[a-z]+\d*")
PARTICIPLE = re.compile(r"\w+ed|Gone|Ready|Running|Lost|Out|Up")

RELATIVE_DOCSTRINGS = """
    src/paceline/cli/checkpoints.py
    src/paceline/cli/doctor/command.py
    src/paceline/cli/top/client.py
    src/paceline/comm/engine/adapters/library_engine.py
    src/paceline/comm/engine/api.py
    src/paceline/comm/engine/channel.py
    src/paceline/comm/engine/failures.py
    src/paceline/comm/engine/native/connections.py
    src/paceline/comm/engine/network_settings.py
    src/paceline/comm/group/compression.py
    src/paceline/comm/group/init.py
    src/paceline/comm/record/__init__.py
    src/paceline/comm/record/layout.py
    src/paceline/comm/record/memory.py
    src/paceline/comm/record/spans.py
    src/paceline/comm/rendezvous/schedulers.py
    src/paceline/comm/schedule/circulant.py
    src/paceline/comm/schedule/simulation.py
    src/paceline/comm/schedule/steps.py
    src/paceline/comm/security/authenticated_listener.py
    src/paceline/comm/security/handshake.py
    src/paceline/interop/horovod/optimizer.py
    src/paceline/interop/integrations/ray.py
    src/paceline/interop/migrate/call_rules.py
    src/paceline/interop/migrate/names.py
    src/paceline/interop/migrate/python_files.py
    src/paceline/interop/migrate/python_source.py
    src/paceline/interop/torch_backend/process_group.py
    src/paceline/operate/dashboard/access.py
    src/paceline/operate/dashboard/dashboard_state.py
    src/paceline/operate/dashboard/directory_collector.py
    src/paceline/operate/dashboard/event_queue.py
    src/paceline/operate/dashboard/job_sample.py
    src/paceline/operate/dashboard/link_rates.py
    src/paceline/operate/dashboard/recording_follower.py
    src/paceline/operate/dashboard/server.py
    src/paceline/operate/diagnosis/call_history.py
    src/paceline/operate/diagnosis/clock_offset.py
    src/paceline/operate/diagnosis/diagnosis.py
    src/paceline/operate/diagnosis/finding.py
    src/paceline/operate/diagnosis/job_snapshot.py
    src/paceline/operate/diagnosis/postmortem.py
    src/paceline/operate/diagnosis/recording.py
    src/paceline/operate/diagnosis/recording_reader.py
    src/paceline/operate/diagnosis/runs.py
    src/paceline/operate/diagnosis/slow_links.py
    src/paceline/operate/diagnosis/stall_detector.py
    src/paceline/operate/diagnosis/wait_graph.py
    src/paceline/operate/launch/dashboard_link.py
    src/paceline/operate/launch/elastic/elastic_agent.py
    src/paceline/operate/launch/elastic/elastic_controller.py
    src/paceline/operate/launch/elastic/elastic_options.py
    src/paceline/operate/launch/elastic/machine_log.py
    src/paceline/operate/launch/elastic/standby_controller.py
    src/paceline/operate/launch/elastic/worker_pool.py
    src/paceline/operate/launch/elastic/worker_replacement.py
    src/paceline/operate/launch/job.py
    src/paceline/operate/launch/launch_script.py
    src/paceline/operate/launch/launcher.py
    src/paceline/operate/launch/multinode/protocol.py
    src/paceline/operate/launch/multinode/remote_client.py
    src/paceline/operate/launch/ssh/protocol.py
    src/paceline/operate/launch/ssh/remote_launch.py
    src/paceline/operate/launch/ssh/remote_launcher.py
    src/paceline/operate/launch/workers/start_workers.py
    src/paceline/operate/plan/advice.py
    src/paceline/operate/plan/calibration.py
    src/paceline/operate/plan/goodput.py
    src/paceline/operate/plan/measure/worker.py
    src/paceline/operate/plan/simulated_job.py
    src/paceline/operate/plan/step_time.py
    src/paceline/train/checkpoint/captured_state.py
    src/paceline/train/checkpoint/format/__init__.py
    src/paceline/train/checkpoint/format/manifest.py
    src/paceline/train/checkpoint/format/regions.py
    src/paceline/train/checkpoint/format/storage.py
    src/paceline/train/checkpoint/host_disks.py
    src/paceline/train/checkpoint/load.py
    src/paceline/train/checkpoint/optimizers.py
    src/paceline/train/checkpoint/ownership.py
    src/paceline/train/checkpoint/peer_memory/cache.py
    src/paceline/train/checkpoint/peer_memory/protocol.py
    src/paceline/train/checkpoint/peer_memory/replicate.py
    src/paceline/train/checkpoint/rank_channel.py
    src/paceline/train/checkpoint/read.py
    src/paceline/train/checkpoint/save_plan.py
    src/paceline/train/checkpoint/shard_layout.py
    src/paceline/train/checkpoint/state_restorer.py
    src/paceline/train/checkpoint/training_state.py
    src/paceline/train/checks/check_settings.py
    src/paceline/train/checks/replica_check.py
    src/paceline/train/data/batches.py
    src/paceline/train/data/epoch_order.py
    src/paceline/train/data/remaining_samples.py
    src/paceline/train/ddp/reducer.py
    src/paceline/train/diloco/exchange_mailbox.py
    src/paceline/train/diloco/exchange_timetable.py
    src/paceline/train/diloco/exchanges.py
    src/paceline/train/elastic/coordinator/elastic_job.py
    src/paceline/train/elastic/coordinator/election.py
    src/paceline/train/elastic/coordinator/handover.py
    src/paceline/train/elastic/coordinator/worker_registry.py
    src/paceline/train/elastic/process_priority.py
    src/paceline/train/elastic/protocol.py
    src/paceline/train/elastic/state_transfer/catch_up.py
    src/paceline/train/elastic/state_transfer/optimizer_steps.py
    src/paceline/train/elastic/state_transfer/receiver.py
    src/paceline/train/elastic/state_transfer/sender.py
    src/paceline/train/elastic/state_transfer/snapshot_server.py
    src/paceline/train/elastic/state_transfer/transfer_protocol.py
    src/paceline/train/elastic/worker/agreement.py
    src/paceline/train/elastic/worker/elastic_averager.py
    src/paceline/train/elastic/worker/elastic_state.py
    src/paceline/train/elastic/worker/progress.py
    src/paceline/train/elastic/worker/view_group.py
    src/paceline/train/elastic/worker/vote.py
    src/paceline/train/elastic/worker/worker_membership.py
    src/paceline/train/join.py
    src/paceline/train/logical_shards/logical_shards.py
    src/paceline/train/logical_shards/shard_batches.py
    src/paceline/train/logical_shards/sharded_replica.py
    src/paceline/train/module_tensors.py
    src/paceline/train/pipeline/execution.py
    src/paceline/train/pipeline/parameter_index.py
    src/paceline/train/pipeline/pipeline.py
    src/paceline/train/pipeline/program.py
    src/paceline/train/pipeline/schedule.py
    src/paceline/train/preconditions.py
    src/paceline/train/shared_model/shared_shards.py
    src/paceline/train/tensor/parallelize.py
    src/paceline/train/tensor/weight_slice.py
    src/paceline/train/training_events.py
    src/paceline/train/zero/partitioned_optimizer.py
    src/paceline/train/zero/state_storage.py
"""
"""Files in which the docstring of the module or of a class still begins with a relative word."""


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of `src` by their paths, without those that imitate Horovod's."""
    files = (file for file in sorted(SOURCES.rglob("*.py")) if STAND_IN not in file.parents)
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [(file, node) for file, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def listed(wrong: list[str]) -> str:
    return "\n".join(["", *wrong])


def test_a_class_name_has_one_meaning():
    files = defaultdict(list)
    for file, node in classes():
        files[node.name].append(file)
    wrong = [f"{name} is a class of {' and of '.join(where)}" for name, where in files.items() if len(where) > 1]
    assert not wrong, listed(wrong)


def test_a_docstring_begins_with_its_subject():
    """A noun, or a verb in -s, and no free relative clause such as `What the ranks agree on`."""
    allowed = set(RELATIVE_DOCSTRINGS.split())
    texts = [(file, "the module", ast.get_docstring(tree)) for file, tree in trees().items()]
    texts += [(file, node.name, ast.get_docstring(node)) for file, node in classes()]
    wrong = [
        f"{file}: the docstring of {name} begins with a relative word: {text.splitlines()[0]}"
        for file, name, text in texts
        if text and RELATIVE.match(text) and file not in allowed
    ]
    assert not wrong, listed(wrong)


def test_a_module_is_named_by_a_noun():
    wrong = [
        f"{file}: a module is named after its main class or function, not after an activity"
        for file in trees()
        if Path(file).stem.endswith("ing") and Path(file).stem not in GERUNDS
    ]
    assert not wrong, listed(wrong)


def test_no_file_is_too_long_to_read():
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in trees()}
    wrong = [f"{file} has {lines} lines" for file, lines in lengths.items() if lines > LONGEST_FILE]
    assert not wrong, listed(wrong)


def test_files_are_few_enough_to_know():
    count = len(list(SOURCES.rglob("*.py")))
    assert count <= MOST_FILES, (
        f"src has {count} Python files, and not {MOST_FILES} or fewer: a file is a concept that a contributor would "
        "ask for by name; fold a short file with one importer into that importer"
    )


def own_terms() -> set[str]:
    """The words of the terms that docs/glossary.md defines."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    return {word for row in rows for word in re.findall(r"\w+", row.lower())}


def is_known(name: str, known: set[str]) -> bool:
    """Whether the name, or its last word, is a known word or the plural of one."""
    endings = {"ies": "y", "es": "", "s": "", "": ""}
    words = [name, name.split("_")[-1]]
    return any(word.removesuffix(end) + one in known for word in words for end, one in endings.items())


def test_a_name_ends_in_a_term_of_the_field():
    """Messages and events may end in a participle after a noun: `WorkerStarted`."""
    known = own_terms().union(*(words.split() for words in TERMS.values()))
    awaiting = AWAITING_A_NAME.split()
    folders = {str(Path(file).parent) for file in trees()} - {"src"}
    names = [(file, node.name, WORDS.findall(node.name)) for file, node in classes()]
    names += [(folder, f"the folder {Path(folder).name}", [Path(folder).name]) for folder in folders]
    wrong = [
        f"{file}: {name} ends in {words[-1]!r}, a word that neither tests/house_terms.py nor docs/glossary.md has"
        for file, name, words in names
        if not is_known(words[-1].lower(), known)
        and not (len(words) > 1 and PARTICIPLE.fullmatch(words[-1]))
        and name not in awaiting
    ]
    assert not wrong, listed(sorted(wrong))


def test_no_exception_is_kept_that_nothing_needs():
    names = {node.name for _, node in classes()}
    modules = {Path(file).stem for file in trees()}
    wrong = [f"there is no class {name} any more" for name in AWAITING_A_NAME.split() if name not in names]
    wrong += [f"there is no module {name} any more" for name in GERUNDS if name not in modules]
    assert not wrong, listed(["tests/house_terms.py has exceptions that nothing needs:", *wrong])
