"""Which questions a record answers: command lines, as a person would type them.

Models are traced first and saved under the names of `GRAPHS`; other files are those of `inputs`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_GPT2 = "hf:gpt2,n_layer=3,n_embd=192,n_head=4,vocab_size=2000,n_positions=128 --batch 4"
_MINI = "hf:gpt2,n_layer=1,n_embd=64,n_head=2,vocab_size=500,n_positions=32 --batch 2"
_LLAMA = (
    "hf:llama,num_hidden_layers=8,hidden_size=256,intermediate_size=640,num_attention_heads=8,"
    "num_key_value_heads=4,vocab_size=3000 --seq-len 128 --batch 2"
)
_EXPERTS = (
    "hf:mixtral,num_hidden_layers=2,hidden_size=128,intermediate_size=256,num_attention_heads=4,"
    "num_key_value_heads=2,num_local_experts=4,vocab_size=1000 --seq-len 64 --batch 2"
)
# What `estimator trace` is told of each graph.
GRAPHS = {
    "gpt2": _GPT2,
    "gpt2-cpu": f"{_GPT2} --target cpu",
    "gpt2-amp": f"{_GPT2} --precision bf16-amp",
    "gpt2-fp16": f"{_GPT2} --precision fp16-amp --grad-scaler --clip-grad-norm",
    "gpt2-bf16": f"{_GPT2} --precision bf16",
    "gpt2-compiled": f"{_GPT2} --precision bf16-amp --compile",
    "gpt2-blocks": f"{_GPT2} --precision bf16-amp --compile-blocks",
    "gpt2-replayed": f"{_GPT2} --precision tf32 --cuda-graphs",
    "gpt2-full": f"{_GPT2} --precision bf16-amp --checkpoint full",
    "gpt2-second": f"{_GPT2} --precision bf16-amp --checkpoint selective:2",
    "gpt2-selective": f"{_GPT2} --precision bf16-amp --checkpoint selective:op",
    "llama": f"{_LLAMA} --precision bf16-amp",
    "llama-cpu": f"{_LLAMA} --target cpu --optimizer sgd",
    "llama-bf16": f"{_LLAMA} --precision bf16",
    "llama-tensorwise": f"{_LLAMA} --precision bf16 --compile --float8 tensorwise",
    "llama-rowwise": f"{_LLAMA} --precision bf16 --compile --float8 rowwise",
    "experts": f"{_EXPERTS} --precision bf16-amp",
    "resnet": (
        "hf:resnet/config.json --batch 4 "
        "--precision fp16-amp --channels-last --optimizer sgd-momentum"
    ),
    "resnet-cpu": ("hf:resnet/config.json --batch 4 --target cpu --optimizer adam"),
    "t5": "hf:t5,num_layers=2,d_model=128,d_ff=256,num_heads=4,vocab_size=1000 --batch 2",
} | {
    f"mini-{optimizer}": f"{_MINI} --optimizer {optimizer}"
    for optimizer in (
        *("sgd", "sgd-momentum", "adam", "adamw", "adam-fused", "adamw-fused", "sgd-loop"),
        *("adam-loop", "adamw-8bit", "lamb", "muon"),
    )
}
STRATEGIES = (
    "ddp",
    "ddp:unbucketed",
    "ddp:view",
    "ddp:bucket=64KiB,first=4KiB,view",
    "ddp:reduce=bf16",
    "zero1",
    "zero1:bucket=1MiB,view",
    "zero1:unbucketed",
    "distributed-optimizer",
    "distributed-optimizer:bucket=1MiB,reduce=fp32",
    "zero2",
    "zero2:bucket=256KiB",
    "fsdp",
    "fsdp:shard=2",
    "fsdp:no_sync",
    "fsdp:no_reshard",
    "fsdp:reduce=fp32",
    "fsdp:offload",
    "ps:1",
    "ps:2,bucket=64KiB",
    "ps:2,async",
    "ps:3,async,link=2Gbit/s",
    "local-sgd:every=3",
)
IN_HALF = ("ddp:master", "zero2:master", "fsdp:param=bf16,reduce=fp32", "distributed-optimizer")
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb", "zbv", "dualpipev", "dualpipe")
LAYOUTS = (
    "tp=2",
    "tp=2,sp",
    "tp=4,sp,vocab",
    "tp=2,vocab",
    "tp=2,sp,megatron",
    "tp=4,sp,vocab,megatron",
    "cp=2",
    "cp=4,ring",
    "tp=2,cp=2",
    *(f"pp=2,schedule={schedule}" for schedule in SCHEDULES),
    *(f"pp=4,schedule={schedule},dp=*" for schedule in SCHEDULES),
    "pp=2,megatron",
    "pp=3,cut=model.layers.2+model.layers.6,dp=4",
    "tp=2,pp=2,schedule=zb",
    "tp=2,sp,pp=2,schedule=interleaved:2",
    "tp=2,cp=2,pp=2",
)
OF_EXPERTS = (
    *("ep=2", "ep=4", "ep=4,imbalance=1.5", "tp=2,ep=2", "tp=2,ep=2,all-reduce", "cp=2,ep=2"),
    *("ep=2,pp=2", "tp=2,sp,ep=4"),
)
LOADERS = (
    "sample=110kB,prep=9ms,workers=1,disk=200MB/s,cached=0.35",
    "sample=150kB,prep=8ms,workers=4",
    "prep=2ms",
    "sample=600kB,prep=1ms,workers=2,pinned=no",
    "prep=3ms,take=1ms,cpu=0.5,workers=2",
)
GPUS = (
    *("1x1:h100-sxm", "1x8:h100-sxm", "2x8:h100-sxm", "4x4:t4-g4dn", "1x2:rtx-3090"),
    *("16x8:a100-sxm-80gb", "2x8:h100-sxm+1x8:a100-sxm-80gb", "1x2:mi300x", "1x4:slow-gpu"),
    *("2x8:fast-gpu+1x4:slow-gpu", "1x8:dgx-1+2x4:v100-p3-8xlarge"),
)
CPUS = (
    *("1x1:slow", "1x4:slow", "2x4:slow", "1x8:fast", "2x2:jammed", "3x2:bare", "1x2:lone"),
    *("2x6:railed", "1x4:slow+1x8:fast", "2x8:fast+1x2:slow+1x2:jammed", "40x4:slow"),
)
RACKS = ("a1[0,1]+a2[3]", "a5[0,1]+a2[2]+a4[0,1,2,3]", "a6[0,1]+a7[1]", "3x4:slow")
HALLS = ("b4[0,1,2,3]", "b1[0,1]+b4[0,1]+b2[6,7]", "d5[0,1]+d1[2]+d5[2,3]", "2x8:h100-sxm")
PLACES = (("gpt2-cpu", CPUS), ("gpt2-amp", GPUS), ("llama", GPUS), ("resnet", GPUS))
POLICIES = (
    *("fifo", "srtf", "max-min", "max-min-uncapped", "afs", "optimus", "tiresias", "gavel"),
    *("pollux", "sia", "ones"),
)


def command_lines() -> list[str]:
    """Every question, once, in a fixed order."""
    found: dict[str, None] = {}
    for part in (_steps, _layouts, _memory, _learnt, _advice, _replays, _others):
        found |= dict.fromkeys(part())
    return list(found)


def _load(draw: random.Random) -> str:
    """A batch and micro-batches."""
    batch = draw.choice(("", "", "--batch 1", "--batch 8", "--batch 3"))
    return f"{batch} {draw.choice(('', '--accumulation 2', '--accumulation 5'))}".strip()


def _steps() -> Iterator[str]:
    for graph, places in (*PLACES, ("llama-cpu", CPUS[:9]), ("resnet-cpu", CPUS[:9])):
        # Tables have every place under every strategy.
        for strategy in STRATEGIES:
            draw = random.Random(f"{graph} {strategy}")
            for place in draw.sample(places, 4):
                load = _load(draw)
                yield f"estimate {graph}.graph --on {place} --strategy {strategy} {load} --json"
    for graph in GRAPHS:
        places = CPUS if graph.endswith("-cpu") else GPUS
        for place in (places[0], places[3], places[8]):
            yield f"estimate {graph}.graph --on {place} --by-module --json"
            yield f"estimate --verbose {graph}.graph --on {place} --json"
    for strategy in IN_HALF:
        for place in GPUS[:4]:
            yield f"estimate llama-bf16.graph --on {place} --strategy {strategy} --json"
    for name, places in (("racks", RACKS), ("halls", HALLS)):
        graph = "gpt2-cpu" if name == "racks" else "gpt2-amp"
        for place in places:
            for strategy in ("ddp", "zero1", "fsdp", "ps:2"):
                asked = f"{graph}.graph --on {place} --cluster {name}.toml --strategy {strategy}"
                yield f"estimate {asked} --json"
                yield f"stalls {asked} --json"
    for place in ("1x4:slow+1x8:fast", "2x8:fast+1x2:slow+1x2:jammed"):
        yield f"estimate gpt2-cpu.graph --on {place} --global-batch 96 --json"
    yield "estimate llama.graph --on 2x8:h100-sxm+1x8:a100-sxm-80gb --global-batch 192 --json"
    yield "estimate llama.graph --on 2x8:h100-sxm --global-batch 256 --batch 2 --json"
    yield "estimate gpt2.graph --on 2x8:h100-sxm --network 25Gbit/s,roce --tokens 1e9 --json"
    for summary in ("flops", "timed"):
        for place in ("1x1:t4-g4dn", "4x4:t4-g4dn", "2x8:h100-sxm"):
            for strategy in ("ddp", "zero2", "fsdp", "ps:2"):
                yield f"estimate {summary}.json --on {place} --strategy {strategy} --json"
        yield f"sweep {summary}.json --on 1..4x1,4:t4-g4dn --json"
        yield f"estimate --verbose {summary}.json --on 1x4:t4-g4dn --json"
    for number, loader in enumerate(LOADERS):
        for graph, place in (("resnet", "2x4:v100-p3-8xlarge"), ("gpt2-cpu", "2x4:slow")):
            yield f"estimate {graph}.graph --on {place} --loader {loader} --json"
            yield f"stalls {graph}.graph --on {place} --loader {loader} --batch {8 + number} --json"
            yield (
                f"estimate {graph}.graph --on {place} --loader {loader} --accumulation 3 "
                "--strategy fsdp --json"
            )
    for strategy in ("ddp", "zero1", "fsdp", "fsdp:offload", "ps:1"):
        for graph, place in (("mini-adamw", "1x2:t4-g4dn"), ("resnet-cpu", "1x2:slow")):
            asked = f"{graph}.graph --on {place} --strategy {strategy} --trace spans.json"
            yield f"estimate {asked} --json"
    asked = f"resnet.graph --on 1x2:t4-g4dn --loader {LOADERS[0]} --trace spans.json"
    yield f"estimate {asked} --json"
    for layout in ("tp=2", "pp=2,schedule=zb"):
        asked = f"experts.graph --on 1x2:t4-g4dn --layout {layout} --accumulation 2"
        yield f"estimate {asked} --trace spans.json --json"


def _layouts() -> Iterator[str]:
    for graph, layouts in (
        *(("llama", LAYOUTS), ("llama-bf16", LAYOUTS[:14]), ("experts", OF_EXPERTS)),
        *(("gpt2-full", LAYOUTS[:14]), ("llama-tensorwise", LAYOUTS[:8])),
    ):
        for layout in layouts:
            place = "3x4:t4-g4dn" if "pp=3" in layout else "2x8:h100-sxm"
            draw = random.Random(f"{graph} {layout}")
            for strategy in _beside(layout):
                asked = f"{graph}.graph --on {place} --layout {layout} --strategy {strategy}"
                yield f"estimate {asked} --accumulation {draw.choice((4, 8, 16))} --json"
            for place in ("2x4:t4-g4dn", "4x4:slow-gpu"):
                asked = f"{graph}.graph --on {place} --layout {layout}"
                yield f"estimate {asked} --accumulation 8 --json"
    for layout in ("tp=2", "pp=2", "cp=2", "tp=2,sp,pp=2"):
        for place in ("2x4:slow", "1x8:fast", "a1[0,1,2,3]"):
            cluster = "--cluster racks.toml" if "[" in place else ""
            asked = f"llama-cpu.graph --on {place} --layout {layout} {cluster}"
            yield f"estimate {asked} --accumulation 4 --json"
    for layout in ("tp=2", "tp=2,sp", "tp=4,pp=2"):
        asked = f"llama.graph --on 1x8:h100-sxm --layout {layout} --accumulation 8"
        yield f"estimate {asked} --tp-plan plan.json --json"
        yield f"estimate {asked} --tp-plan plan.json --strategy fsdp --json"


def _beside(layout: str) -> tuple[str, ...]:
    """Strategies that can be estimated beside a layout, and one that is refused."""
    if "ep=" in layout:
        return "ddp", "fsdp", "fsdp:no_reshard", "zero1"
    if "pp=" in layout:
        return "ddp", "zero1", "distributed-optimizer", "fsdp:no_reshard", "fsdp"
    return "ddp", "zero1", "distributed-optimizer", "zero2", "fsdp"


def _memory() -> Iterator[str]:
    for strategy in (*STRATEGIES[:2], STRATEGIES[2], *STRATEGIES[5:18:2], "fsdp:shard=2", "ps:2"):
        for load in ("", "--accumulation 3"):
            asked = f"--on 2x4:t4-g4dn --strategy {strategy} {load}"
            yield f"memory gpt2-amp.graph {asked} --json"
    for strategy in IN_HALF:
        yield f"memory llama-bf16.graph --on 1x8:h100-sxm --strategy {strategy} --json"
    for layout in (*LAYOUTS[:5], *LAYOUTS[6:16], "tp=2,pp=2,schedule=zb"):
        asked = f"llama.graph --on 1x8:h100-sxm --layout {layout} --accumulation 4"
        yield f"memory {asked} --json"
    for graph in GRAPHS:
        place = "1x4:slow" if graph.endswith("-cpu") else "1x1:t4-g4dn"
        yield f"memory {graph}.graph --on {place} --json"
    for graph, place in (("gpt2-amp", "1x2:rtx-3090"), ("resnet", "1x1:t4-g4dn")):
        yield f"memory {graph}.graph --on {place} --snapshot snapshot.pickle --json"
        yield f"memory {graph}.graph --on 1x1:t4-g4dn --plans --json"
    yield "memory mini-adamw.graph --on 1x1:rtx-3090 --plans --json"
    # Does not fit: what would make it fit.
    yield "memory gpt2.graph --on 1x4:t4-g4dn --batch 2000 --json"
    yield "estimate gpt2.graph --on 1x4:t4-g4dn --batch 2000 --json"


def _learnt() -> Iterator[str]:
    for graph, machine in (("gpt2-cpu", "slow"), ("gpt2-amp", "h100-sxm")):
        store = f"{graph}.db"
        for devices in ("1x1", "1x2", "1x4", "2x4", "4x4"):
            for strategy in ("ddp", "zero1", "zero2", "fsdp", "ps:2"):
                asked = f"{graph}.graph --on {devices}:{machine} --strategy {strategy}"
                load = _load(random.Random(asked))
                yield f"estimate {asked} {load} --calibration {store} --json"
        yield f"calibrate fit {graph}.graph --store {store} --json"
        yield f"calibrate show --store {store} --json"
        yield f"sweep {graph}.graph --on 1..3x1,2,4:{machine} --calibration {store} --json"
        yield f"stalls {graph}.graph --on 2x4:{machine} --calibration {store} --json"
    yield "calibrate observe seen.csv --store fresh.db --json"
    learnt = "--calibration gpt2-amp.db --json"
    yield f"layouts gpt2-amp.graph --on 1x8:h100-sxm --global-batch 64 {learnt}"


def _advice() -> Iterator[str]:
    for graph, places in (
        ("gpt2-amp", ("1x8:h100-sxm", "2x4:t4-g4dn")),
        ("llama", ("2x8:h100-sxm", "1x8:a100-p4d")),
        ("experts", ("1x8:h100-sxm",)),
        ("llama-cpu", ("1x4:slow",)),
    ):
        for place in places:
            for batch in (64, 256):
                yield f"layouts {graph}.graph --on {place} --global-batch {batch} --json"
    rented = "--machines t4-g4dn,a100-p4d,v100-p3-8xlarge,h100-p5 --max-nodes 2 --samples 1e8"
    for graph in ("gpt2-amp", "llama", "resnet"):
        for more in (
            *("", "--mixed", "--deadline 2h", "--budget 200", "--strategies 'zero1 fsdp'"),
            *("--spot", "--prices prices.csv"),
            "--spot --revoked-every 8h --checkpoint-time 60s --restart 4min",
            "--spot --revoked-every t4-g4dn=8h,a100-p4d=20h,v100-p3-8xlarge=6h,h100-p5=9h",
        ):
            yield f"rent {graph}.graph {rented} {more} --json"
    shared = "--machines t4-g4dn,a100-p4d --max-nodes 2 --samples 1e8 --global-batch 64"
    yield f"rent gpt2-amp.graph {shared} --json"
    for graph, place in (("gpt2-cpu", "slow"), ("gpt2-amp", "h100-sxm"), ("llama", "t4-g4dn")):
        yield f"sweep {graph}.graph --on 1..4x1,2,4:{place} --json"
        yield f"sweep {graph}.graph --on 1..4x1,2,4:{place} --csv"
        yield f"sweep {graph}.graph --on 1x1:{place} --batch 1..256 --json"
        asked = "--strategies 'ddp zero1 zero2 fsdp fsdp:shard=2 ps:2 ps:2,async'"
        yield f"sweep {graph}.graph --on 1x4:{place} --on 2x4:{place} {asked} --json"
        for strategy in ("ddp", "zero1", "fsdp", "fsdp:offload", "ps:2", "ps:2,async"):
            for devices in ("1x4", "2x4"):
                yield f"stalls {graph}.graph --on {devices}:{place} --strategy {strategy} --json"
        yield f"stalls {graph}.graph --on 2x4:{place} --against 1x1:{place} --json"
        yield f"slurm {graph}.graph --on 2x4:{place} --samples 1e6 --json"
    yield "stalls llama.graph --on 2x4:t4-g4dn --layout tp=2 --accumulation 4 --json"


def _replays() -> Iterator[str]:
    for policy in POLICIES:
        yield f"replay jobs.json --on 2x4:gtx-1080-roce --policy {policy} --json"
        yield (
            f"replay jobs.json --on 3x4:gtx-1080-roce --policy {policy} --believed calibrated "
            "--seed 3 --restart 20 --checkpoint-every 5 --node-mtbf 4000 --json"
        )
    for more in ("--placement pack", "--placement even", "--placement spread --believed perfect"):
        policies = "--policy fifo --policy max-min --policy afs"
        yield f"replay jobs.json --on 3x4:gtx-1080-roce {policies} {more} --json"


def _others() -> Iterator[str]:
    for graph, more in (
        ("gpt2-amp", "--samples 1e6"),
        ("llama", "--layout tp=2,pp=2 --accumulation 4"),
        ("gpt2-amp", "--against gpt2-amp.db"),
        ("resnet", f"--loader {LOADERS[0]} --strategy zero1"),
    ):
        yield f"report {graph}.graph --on 1x8:h100-sxm {more} -o page.html --json"
    yield "slurm gpt2-amp.graph --on 2x4:t4-g4dn --samples 1e6"
    for name in ("h100-sxm", "t4-g4dn", "slow", "jammed", "railed-gpu"):
        yield f"machines show {name} --json"
    yield "machines compare h100-sxm a100-sxm-80gb --json"
    yield "machines compare slow fast jammed --json"
    yield "machines list --json"
