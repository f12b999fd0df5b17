"""Counts the inserted mistakes that the doctor finds, and the false findings that it reports in public scripts.

    python bench/doctor.py FOLDER [--fetch] [--json FILE]

FOLDER contains a clone of each repository; --fetch creates these clones. The doctor checks the files that use
communication between ranks. All of its findings with high confidence were checked by hand; the false findings are
listed below. The inserted mistakes are the same as in the tests. Because the repositories change, a later run may
report other findings, which must then be checked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from multiprocessing import Pool
from pathlib import Path

from report import parser, show

from paceline.cli.doctor import Confidence, Diagnostic
from paceline.cli.doctor.command import check_script

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from healthy_scripts import HEALTHY
from planted_mistakes import RANK_MISTAKES, TRAINING_MISTAKES

REPOSITORIES = [
    "17Skye17/pytorch-DDP-code-snippet", "AaltoRSE/pytorch-ddp-imagenet", "Alibaba-MIIL/ASL",
    "Alibaba-MIIL/ImageNet21K", "Andrei-Aksionov/nanoGPTplus", "AndyYuan96/pytorch-distributed-training",
    "AnishJoshi13/Pytorch-DDP", "AnswerDotAI/fsdp_qlora", "Atten4Vis/ConditionalDETR", "B-Tulgat/Pytorch-DDP-HPC",
    "Beilong-Tang/pytorch-ddpm-ddp", "Blaizzy/pytorch-ddp", "Burakblm/learn-pytorch-ddp", "CSCfi/pytorch-ddp-examples",
    "ChuckGarcian/pytorch-distributed", "CoinCheung/BiSeNet", "CuiJiali-CV/pytorch-ddp", "DeepVoltaire/AutoAugment",
    "EleutherAI/gpt-neox", "FoundationVision/LlamaGen", "FoundationVision/VAR",
    "FrancescoSaverioZuppichini/pytorch-distributed-collective-communication",
    "Guitaricet/pytorch-distributed-example", "HRNet/HRNet-Semantic-Segmentation", "HobbitLong/SupContrast",
    "IDEA-Research/DINO", "Jackxiini/Pytorch-distributed-learning", "JayDS22/Multi-GPU-Distributed-Training-Framework",
    "JiaweiShiCV/PyTorch-DDP", "Js2Hou/Pytorch-DDP-Analysis", "KellerJordan/cifar10-airbench",
    "KellerJordan/modded-nanogpt", "Kotomiya07/pytorch-ddp-samples", "KularatnaS/pytorch-ddp-with-model-parallel",
    "LTH14/mar", "LTH14/rcg", "LambdaLabsML/distributed-training-guide",
    "Lance0218/Pytorch-DistributedDataParallel-Training-Tricks", "Lightning-AI/litgpt", "MCG-NJU/VideoMAE",
    "Megvii-BaseDetection/YOLOX", "NVIDIA/BigVGAN", "NVIDIA/apex", "NVIDIA/flowtron", "NVIDIA/mellotron",
    "NVIDIA/pix2pixHD", "NVIDIA/retinanet-examples", "NVIDIA/semantic-segmentation", "NVIDIA/tacotron2",
    "NVIDIA/waveglow", "NVlabs/SegFormer", "NVlabs/edm", "NVlabs/stylegan3", "OpenGVLab/InternImage",
    "PrecipiceBlades/fsdp-learning-cs336-style", "RVC-Project/Retrieval-based-Voice-Conversion-WebUI",
    "RunxinXu/pytorch-distributed", "SHI-Labs/Compact-Transformers", "Samarmy/Pytorch-Distributed",
    "SeanNaren/deepspeech.pytorch", "ShaneLiu04/nanoGPT-Modern", "ShigekiKarita/pytorch-distributed-slurm-example",
    "ShoufaChen/DiffusionDet", "SuperbTUM/Faster-Distributed-Training", "The-AI-Summer/pytorch-ddp",
    "Tramac/awesome-semantic-segmentation-pytorch", "TylrDn/pytorch-ddp-nccl-distributed",
    "Ugenteraan/PyTorch-Distributed-Processing-MNIST", "Vchitect/Latte", "WongKinYiu/yolov7",
    "Yun-960/Pytorch-Distributed-Template", "ZhaoJ9014/face.evoLVe.PyTorch",
    "albertbuchard/slurm-pytorch-ddp-boilerplate", "allenai/OLMo", "ammunk/distributed-training-pytorch",
    "artidoro/qlora", "aruncs2005/pytorch-ddp-sagemaker-example", "aurotripathy/pytorch-distributed-tut",
    "azzeddineCH/flash-nanoGPT", "baaivision/EVA", "baofff/U-ViT", "bigscience-workshop/Megatron-DeepSpeed",
    "bytedance/byteps", "bytedance/ibot", "chaochen1998/Pytorch-distributed-training-demo", "chenxin-dlut/TransT",
    "chkda/pytorch-distributed-tutorials", "ciscops/pytorch-ddp-benchmark", "crowsonkb/k-diffusion",
    "d-li14/mobilenetv2.pytorch", "daddyofadoggy/pytorch-distributed", "databricks/megablocks",
    "ddiyoung-x4/pytorch-DDP-tutorial", "dnddnjs/pytorch-multigpu", "edwardpwtsoi/pytorch-ddp-with-gke",
    "eladhoffer/convNet.pytorch", "eladhoffer/utils.pytorch", "eric-mitchell/direct-preference-optimization",
    "facebookresearch/ConvNeXt", "facebookresearch/ConvNeXt-V2", "facebookresearch/DPR", "facebookresearch/DiT",
    "facebookresearch/ImageBind", "facebookresearch/LeViT", "facebookresearch/Mask2Former", "facebookresearch/SLIP",
    "facebookresearch/SlowFast", "facebookresearch/TimeSformer", "facebookresearch/XLM", "facebookresearch/audiocraft",
    "facebookresearch/barlowtwins", "facebookresearch/contriever", "facebookresearch/deepcluster",
    "facebookresearch/deit", "facebookresearch/demucs", "facebookresearch/detectron2", "facebookresearch/detr",
    "facebookresearch/diht", "facebookresearch/dino", "facebookresearch/dinov2", "facebookresearch/encodec",
    "facebookresearch/fairscale", "facebookresearch/fairseq", "facebookresearch/ijepa", "facebookresearch/jepa",
    "facebookresearch/lingua", "facebookresearch/mae", "facebookresearch/metaseq", "facebookresearch/mixup-cifar10",
    "facebookresearch/moco", "facebookresearch/moco-v3", "facebookresearch/msn", "facebookresearch/sam2",
    "facebookresearch/segment-anything-2", "facebookresearch/simsiam", "facebookresearch/suncet",
    "facebookresearch/swav", "facebookresearch/torchbeast", "facebookresearch/vicreg", "facebookresearch/xcit",
    "foundation-model-stack/fms-fsdp", "fundamentalvision/Deformable-DETR",
    "gnovack/distributed-training-and-deepspeed", "haofanwang/pytorch-distributed-training", "haozhi1817/pytorch-ddp",
    "harveyp123/Pytorch-DDP-Example", "hedes1992/pytorch-distributed-example", "horovod/horovod",
    "howardlau1999/pytorch-ddp-template", "hpcaitech/ColossalAI-Examples", "huggingface/accelerate",
    "huggingface/nanotron", "huggingface/picotron", "huggingface/pytorch-image-models", "ikostrikov/pytorch-a3c",
    "implus/UM-MAE", "ish-shalom/pytorch-distributed-training", "jSwords91/pytorch-ddp",
    "jayroxis/pytorch-DDP-tutorial", "jaywalnut310/vits", "jgcb00/nanoGPT", "jik876/hifi-gan", "jingyaogong/minimind",
    "jkhlr/pytorch-distributed-rnn", "jzhang38/TinyLlama", "kakaobrain/torchgpipe", "karpathy/build-nanogpt",
    "karpathy/llm.c", "karpathy/minGPT", "karpathy/nanoGPT", "karpathy/nanochat", "keyu-tian/SparK",
    "keyunluo/Pytorch-DDP", "klei22/nanoGPT", "kuangliu/pytorch-cifar", "kyoungseoun-chung/pytorch-distributed-cpu",
    "learning-at-home/hivemind", "lesliejackson/PyTorch-Distributed-Training",
    "levindabhi/PyTorch-Distributed-DataParallel", "limJhyeok/distributed-training-learning",
    "linuzb/pytorch-ddp-example", "linyihaolyh/SRGAN-with-distributed-training", "lllyasviel/ControlNet",
    "lucidrains/DALLE-pytorch", "lucidrains/audiolm-pytorch", "lucidrains/denoising-diffusion-pytorch",
    "lucidrains/imagen-pytorch", "lucidrains/vector-quantize-pytorch", "lucidrains/vit-pytorch", "lyuwenyu/RT-DETR",
    "meituan/YOLOv6", "meliketoy/wide-resnet.pytorch", "meta-llama/llama-recipes", "microsoft/Cream", "microsoft/CvT",
    "microsoft/SimMIM", "microsoft/Swin-Transformer", "milesial/Pytorch-UNet", "mlfoundations/open_clip",
    "mlfoundations/open_flamingo", "montefiore-institute/pytorch-distributed",
    "narumiruna/pytorch-distributed-example", "nauyan/PyTorch-Distributed-Tutorials",
    "nbeeeel/PyTorch-Distributed-Data-Parallelism-Mnist-Digit-Data", "olehb/pytorch_ddp_tutorial",
    "onlytailei/pytorch-distributed", "open-mmlab/OpenPCDet", "open-mmlab/mmengine", "openai/consistency_models",
    "openai/guided-diffusion", "openai/improved-diffusion", "openai/jukebox", "overfitover/pytorch-distributed",
    "ownzonefeng/pytorch-distributed-training-example", "polkadot21/fsdp", "pyg-team/pytorch_geometric",
    "pytorch/PiPPy", "pytorch/elastic", "pytorch/examples", "pytorch/opacus", "pytorch/torchtitan",
    "pytorch/torchtune", "qqaatw/pytorch-distributed-training", "rakshithvasudev/pytorch-distributed",
    "rentainhe/pytorch-distributed-training", "rishikksh20/iSTFTNet-pytorch", "rosinality/stylegan2-pytorch",
    "rushi-the-neural-arch/PyTorch-DistributedTraining", "rwightman/efficientdet-pytorch", "sail-sg/Adan",
    "sail-sg/poolformer", "salesforce/ALBEF", "salesforce/BLIP", "salesforce/LAVIS", "scott89/Pytorch-DDP",
    "seba-1511/dist_tuto.pth", "shishuai-ss/PyTorch-DDP-demo", "shivangraval50/distributed-training-lab",
    "sihyun-yu/REPA", "skj092/pytorch-ddp-example", "snakers4/silero-models", "somsomy499/pytorch-distributed",
    "sparklerz/pytorch-ddp-experiment", "speedinghzl/CCNet", "stas00/ml-engineering", "svc-develop-team/so-vits-svc",
    "swax10/Pytorch-DDP", "taishan1994/pytorch-distributed-NLP", "tanishqkumar/beyond-nanogpt",
    "tatsu-lab/stanford_alpaca", "tczhangzhi/pytorch-distributed", "tkianai/pytorch-distributed-training-template",
    "tloen/alpaca-lora", "ultralytics/yolov3", "ultralytics/yolov5", "victoresque/pytorch-template",
    "victorfjansen/pytorch-distributed-learning", "vladislavkruglikov/kubernetes-pytorch-distributed-data-parallel",
    "vvvm23/pytorch-ddp", "vwxyzjn/cleanrl", "w86763777/pytorch-ddpm", "wangkuiyi/pytorch-distributed-tutorials",
    "wawancenggoro/pytorch-ddp-cifar10", "weiaicunzai/pytorch-cifar100", "wenet-e2e/wenet", "whai362/PVT",
    "willgpaik/pytorch-ddp-scaling-benchmark", "willisma/SiT", "wilson1yan/VideoGPT",
    "xiezheng-cs/PyTorch_Distributed_Template", "xiezheng-cs/pytorch-distributed", "xinntao/BasicSR",
    "xuqi220/pytorch-distributed-training", "yang-song/score_sde_pytorch", "yangkky/distributed_tutorial",
    "yash-malik/pytorch-distributed", "ymg1114/pytorch-distributed-reinforcement-learning",
    "yubingjiaocn/pytorch-ddp-example", "zahmedy/PyTorch-Distributed-Data-Parallel-DDP-Trainer",
    "zfhxi/pytorch-ddp-demo", "zhfeing/pytorch-distributed-training", "zhihanyang2022/pytorch-ddpg",
    "zjykzj/pytorch-distributed", "zyqhnu/Simple-PyTorch-Distributed-Training-2X8GPU",
]  # fmt: skip
COMMUNICATES = re.compile(
    r"init_process_group|DistributedDataParallel|torch\.distributed|horovod|init_distributed|Accelerator|RANK"
)
LEFT_OUT = re.compile(r"/tests?/|modded-nanogpt/records/")
FALSE_ALARMS = {
    ("accelerate/src/accelerate/test_utils/scripts/test_merge_weights.py", "no-map-location"),  # saved from the CPU
    ("pytorch-ddp-sagemaker-example/code/train_bert.py", "other-sampler"),  # both have the same length
    ("d-li14+mobilenetv2.pytorch/imagenet.py", "first-gpu"),  # one process per machine uses all GPUs
    ("d-li14+mobilenetv2.pytorch/imagenet.py", "no-map-location"),
    ("d-li14+mobilenetv2.pytorch/imagenet.py", "all-ranks-save"),
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
    return {
        "scripts": "with an inserted mistake",
        "count": len(scripts),
        "right findings": hits,
        "false findings": wrong,
    }


def healthy() -> dict[str, object]:
    wrong = sum(len(certain(text)) for text in HEALTHY.values())
    return {"scripts": "without mistakes", "count": len(HEALTHY), "right findings": 0, "false findings": wrong}


def public(folder: Path) -> dict[str, object]:
    """Returns the findings in the files of the repositories whose clones are in the folder."""
    clones = [path for path in (folder / each.replace("/", "+") for each in REPOSITORIES) if path.is_dir()]
    paths = sorted(path for clone in clones for path in clone.glob("**/*.py") if not LEFT_OUT.search(str(path)))
    with Pool(len(os.sched_getaffinity(0))) as pool:
        results = [found for found in pool.imap(check, filter(Path.is_file, paths), chunksize=8) if found is not None]
    wrong = 0
    for path, finding in (each for found in results for each in found):
        is_wrong = any(path.endswith(end) and finding.about == rule for end, rule in FALSE_ALARMS)
        wrong += is_wrong
        print(f"{'wrong' if is_wrong else 'right'} {path}:{finding.line}: {finding.about}: {finding.seen}", flush=True)
    found = sum(map(len, results)) - wrong
    name = f"files of {len(clones)} public repositories"
    return {"scripts": name, "count": len(results), "right findings": found, "false findings": wrong}


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that contains the clones")
    arguments.add_argument("--fetch", action="store_true", help="clone the repositories into FOLDER first")
    options = arguments.parse_args()
    if options.fetch:
        fetch(options.folder)
    show("Findings of paceline doctor", [planted(), healthy(), public(options.folder)], options.json)


if __name__ == "__main__":
    main()
