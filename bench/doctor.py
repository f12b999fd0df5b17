"""Counts the planted mistakes that the doctor finds and the false findings that it reports in public scripts.

    python bench/doctor.py FOLDER [--fetch] [--json FILE]

FOLDER contains a clone of each repository; --fetch creates these clones. The doctor checks the files that use
communication between ranks. All its findings with high confidence were read by hand; the wrong findings are listed
below. The planted mistakes are those of the tests. Because the repositories change, a later run may report other
findings, which have to be read again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from multiprocessing import Pool
from pathlib import Path

from report import parser, show

from paceline.cli.doctor import Confidence, Diagnostic
from paceline.cli.doctor.command import check_script

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from planted_mistakes import HEALTHY, RANK_MISTAKES, TRAINING_MISTAKES

REPOSITORIES = [
    "KellerJordan/modded-nanogpt", "NVIDIA/apex", "NVlabs/stylegan3", "HobbitLong/SupContrast", "WongKinYiu/yolov7",
    "baaivision/EVA", "bigscience-workshop/Megatron-DeepSpeed", "databricks/megablocks", "facebookresearch/ConvNeXt",
    "facebookresearch/ConvNeXt-V2", "facebookresearch/DiT", "facebookresearch/SlowFast",
    "facebookresearch/barlowtwins", "facebookresearch/deit", "facebookresearch/detr", "facebookresearch/dino",
    "facebookresearch/ijepa", "facebookresearch/mae", "facebookresearch/moco", "facebookresearch/simsiam",
    "facebookresearch/swav", "facebookresearch/vicreg", "horovod/horovod", "huggingface/accelerate",
    "huggingface/pytorch-image-models", "jzhang38/TinyLlama", "karpathy/build-nanogpt", "karpathy/llm.c",
    "karpathy/minGPT", "karpathy/nanoGPT", "karpathy/nanochat", "lucidrains/denoising-diffusion-pytorch",
    "lucidrains/vector-quantize-pytorch", "lucidrains/vit-pytorch", "microsoft/Swin-Transformer",
    "mlfoundations/open_clip", "openai/guided-diffusion", "pytorch/elastic", "pytorch/examples", "pytorch/torchtitan",
    "rentainhe/pytorch-distributed-training", "rosinality/stylegan2-pytorch", "salesforce/BLIP",
    "seba-1511/dist_tuto.pth", "tczhangzhi/pytorch-distributed", "ultralytics/yolov5", "wilson1yan/VideoGPT",
    "yangkky/distributed_tutorial",
]  # fmt: skip
COMMUNICATES = re.compile(
    r"init_process_group|DistributedDataParallel|torch\.distributed|horovod|init_distributed|Accelerator|RANK"
)
LEFT_OUT = re.compile(r"/tests?/|modded-nanogpt/records/")
FALSE_ALARMS = {
    ("accelerate/src/accelerate/test_utils/scripts/test_merge_weights.py", "no-map-location"),  # saved from the CPU
}


def fetch(folder: Path) -> None:
    for name in REPOSITORIES:
        target = folder / name.replace("/", "+")
        if not target.exists():
            subprocess.run(
                ["git", "clone", "--quiet", "--depth", "1", f"https://github.com/{name}", target], check=True
            )


def certain(text: str) -> list[Diagnostic]:
    return [each for each in check_script(text) if each.confidence is Confidence.HIGH]


def check(path: Path) -> list[tuple[str, Diagnostic]] | None:
    """Returns the findings in a file, or None if it uses no communication or this version of Python cannot parse it."""
    try:
        text = path.read_text()
        return [(str(path), each) for each in certain(text)] if COMMUNICATES.search(text) else None
    except (OSError, ValueError, SyntaxError):
        return None


def planted() -> dict[str, object]:
    scripts = [(rule, text) for rule, texts in {**RANK_MISTAKES, **TRAINING_MISTAKES}.items() for text in texts]
    found = [[each.about for each in certain(text)] for _, text in scripts]
    wrong = sum(name != rule for names, (rule, _) in zip(found, scripts, strict=True) for name in names)
    hits = sum(rule in names for names, (rule, _) in zip(found, scripts, strict=True))
    return {"scripts": "with a planted mistake", "count": len(scripts), "found": hits, "false alarms": wrong}


def healthy() -> dict[str, object]:
    wrong = sum(len(certain(text)) for text in HEALTHY.values())
    return {"scripts": "without mistakes", "count": len(HEALTHY), "found": 0, "false alarms": wrong}


def public(folder: Path) -> dict[str, object]:
    paths = sorted(path for path in folder.glob("*/**/*.py") if not LEFT_OUT.search(str(path)) and path.is_file())
    with Pool() as pool:
        results = [found for found in pool.imap(check, paths, chunksize=8) if found is not None]
    wrong = 0
    for path, finding in (each for found in results for each in found):
        is_wrong = any(path.endswith(end) and finding.about == rule for end, rule in FALSE_ALARMS)
        wrong += is_wrong
        print(f"{'wrong' if is_wrong else 'right'} {path}:{finding.line}: {finding.about}: {finding.seen}", flush=True)
    found = sum(map(len, results)) - wrong
    repositories = len([path for path in folder.iterdir() if path.is_dir()])
    name = f"files of {repositories} public repositories"
    return {"scripts": name, "count": len(results), "found": found, "false alarms": wrong}


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the repositories")
    arguments.add_argument("--fetch", action="store_true", help="clone the repositories into FOLDER first")
    options = arguments.parse_args()
    if options.fetch:
        fetch(options.folder)
    show("Findings of paceline doctor", [planted(), healthy(), public(options.folder)], options.json)


if __name__ == "__main__":
    main()
