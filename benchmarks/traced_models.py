"""Trace every timm model and every trainable transformers type, and count the failures.

Run it in an environment of its own: timm needs torchvision, whose wheel does not load beside a CPU
build of torch unless two schemas are defined first, which this does. Results go to a file as they
come, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from options import Options
from records import Records, say

SUITES = ("timm", "transformers")
# Models drawn of each, and the share that is to be traced.
SAMPLES, QUICK_MODELS = {"timm": 240, "transformers": 10_000}, 8
LEAST_TRACED = {"timm": 0.99, "transformers": 0.95}
BATCH = 2
# Short, because the CPU runs state-space models step by step: 512 steps are 300,000 operators.
LENGTH = 64
MEMORY_BYTES = 8 << 30
# Of processor time, so that other work on the machine fails no model.
TIMEOUT_S = 300.0
# A worker is started anew after so many models, because torch and the models' modules keep caches.
MODELS_PER_WORKER = 25


def run(options: Options) -> Mapping[str, Any]:
    """Trace what the results file lacks: all types of transformers, some models of timm."""
    records, cases = Records(options.work / "coverage.jsonl"), []
    for suite in SUITES[1:] if options.quick else SUITES:
        names = list(filter(options.takes, names_of(suite)))
        most = QUICK_MODELS if options.quick else SAMPLES[suite]
        if most < len(names):
            names = sorted(random.Random(0).sample(names, most))
        # The last word on a model counts.
        known = {each["model"]: each for each in records.found if each["suite"] == suite}
        left = [name for name in names if name not in known]
        for name, found in ask_all([sys.executable, __file__, suite], left):
            known[name] = {"suite": suite, "model": name, **found}
            records.add(known[name])
            say(f"{suite} {name}: {found['status']} {found.get('reason', '')}"[:300])
        cases += [{"id": f"{suite} {name}", **known[name]} for name in names if name in known]
    cases = [{name: each[name] for name in each if name != "at"} for each in cases]
    return {"cases": cases + figures(cases), "report": failures(cases)}


def ask_all(command: list[str], names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What workers say of each name; one that hangs or dies is a failure of its name."""
    waiting = list(names)
    while waiting:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as worker:
            try:
                for _ in range(min(MODELS_PER_WORKER, len(waiting))):
                    name = waiting.pop(0)
                    case = ask(worker, name)
                    yield name, case
                    if case.get("died"):
                        break
            finally:
                worker.kill()


def ask(worker: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """One model's result, or why there is none."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(name + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        code = worker.wait()
        reason = f"the process died ({code})"
        if code == -signal.SIGPROF:
            reason = f"no answer in {TIMEOUT_S:.0f} s of processor time"
        return {"status": "failed", "reason": reason, "died": True}
    return json.loads(answer)  # type: ignore[no-any-return]


def figures(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The share of each suite's models that is traced, of all and of those that can be built."""
    shares = []
    for suite, least in LEAST_TRACED.items():
        mine = [case for case in cases if case["suite"] == suite]
        trainable = [case for case in mine if case["status"] != "no_training_head"]
        traced = [case for case in trainable if case["status"] == "ok"]
        buildable = [c for c in trainable if c["status"] == "ok" or not beyond_us(c["reason"])]
        for what, models in (("", trainable), (" that can be built here", buildable)):
            if models:
                name = f"{suite}: traced of {len(models)} models{what}"
                share = {"value": len(traced) / len(models)}
                shares.append({"id": name, **share, "least": None if what else least})
    return shares


def failures(cases: list[dict[str, Any]]) -> list[str]:
    """How many of each cause, then each of them."""
    failed = [case for case in cases if case["status"] == "failed"]
    counts = Counter(cause_of(case["reason"]) for case in failed)
    lines = [f"{count} {cause}" for cause, count in counts.most_common()]
    return lines + [f"{case['id']}: {case['reason']}" for case in failed]


CANNOT_BUILD = "transformers cannot build its own default configuration"


def cause_of(reason: str) -> str:
    """The kind of a failure, for counting."""
    library = re.search(r"requires the (\S+) library", reason)
    if library:
        return f"needs library {library[1]}"
    for words, cause in (
        ("cannot be built", CANNOT_BUILD),
        ("the configuration of", CANNOT_BUILD),
        ("needs the value", "shapes or branches depend on weights"),
        ("no answer in", "out of time"),
        ("the process died", "out of memory"),
        ("allocate memory", "out of memory"),
        ("no batch is known", "no batch is known"),
        ("cannot run on this batch", "does not run on the batch made for it"),
    ):
        if words in reason:
            return cause
    return "other"


def beyond_us(reason: str) -> bool:
    """Whether the model cannot be built here at all, with or without this package."""
    return cause_of(reason).startswith((CANNOT_BUILD, "needs library"))


@functools.cache
def define_torchvision_schemas() -> Any:
    """Let torchvision's wheel load beside a CPU torch: at import it registers fakes for these."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # its schemas go when it is collected


def names_of(suite: str) -> list[str]:
    """Every model of a suite, by name."""
    define_torchvision_schemas()
    if suite == "timm":
        import timm

        return list(timm.list_models())
    from transformers.models.auto import configuration_auto

    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


# What the arguments that models learn from are called.
_LEARNED_FROM = ("label", "start_positions", "return_loss", "future_values", "actions")
# Words of models that have a head and refuse to train it.
_NOT_TRAINED = r"[Tt]raining\b[^.]* is not (yet )?(supported|implemented)|not support training"


def answer(look: Callable[[str], dict[str, Any]]) -> None:
    """Answer each name on stdin with one line of JSON on stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers, sys.stdout = sys.stdout, sys.stderr
    define_torchvision_schemas()
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        began = time.process_time()
        # Unhandled, the signal ends the worker.
        signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
        try:
            case = look(line.strip())
        except Exception as error:  # noqa: BLE001 - failures of any kind are counted
            text = " ".join(str(error).split())
            refused = re.search(_NOT_TRAINED, text)
            case = {
                "status": "no_training_head" if refused else "failed",
                "reason": f"{type(error).__name__}: {text}"[:600],
            }
        case["seconds"] = round(time.process_time() - began, 2)
        print(json.dumps(case), file=answers, flush=True)


def look_at_timm(name: str) -> dict[str, Any]:
    """Trace a timm model on its own input size."""
    import torch

    model = build_timm(name)
    size = model.default_cfg.get("input_size") or (3, 224, 224)
    return traced(model, torch.randn(BATCH, *size), name)


def build_timm(name: str, **settings: Any) -> Any:
    """A timm model to be trained, without weights if it can be built so."""
    import timm

    from estimator.graph.models.transformers_models import WithoutWeights

    try:
        with WithoutWeights():
            return timm.create_model(name, pretrained=False, **settings).train()
    except (RuntimeError, NotImplementedError):  # a constructor that computes with weights
        return timm.create_model(name, pretrained=False, **settings).train()


def look_at_transformers(kind: str) -> dict[str, Any]:
    """Trace a transformers type with its default head and configuration."""
    from estimator.errors import ModelError, TraceError
    from estimator.graph.models import load_model

    length = min(LENGTH, positions_of(kind))
    try:
        model, batch, _, name = load_model(f"hf:{kind}", batch=BATCH, seq_len=length, weights=False)
    except ModelError as error:
        if "the configuration of" in str(error):
            raise
        if any(trains(head) and not refuses(head) for head in head_classes(kind)):
            raise
        return {"status": "no_training_head"}
    if not trains(type(model)):
        return {"status": "no_training_head"}
    try:
        return traced(model, batch, name)
    except TraceError:
        # A model without weights has no values of buffers to branch on: try it with them.
        if sum(parameter.nbytes for parameter in model.parameters()) > MEMORY_BYTES // 4:
            raise
        model, batch, _, name = load_model(f"hf:{kind}", batch=BATCH, seq_len=length)
        return traced(model, batch, name)


def head_classes(kind: str) -> list[Any]:
    """The classes that transformers has for the heads of a type."""
    import transformers

    from estimator.graph.models.transformers_models import heads_of

    config = transformers.AutoConfig.for_model(kind)
    mapped = [auto._model_mapping[type(config)] for auto in heads_of(transformers, config).values()]
    return [
        one for each in mapped for one in (each if isinstance(each, (list, tuple)) else (each,))
    ]


def trains(model_class: Any) -> bool:
    """Whether a class learns from an argument, or is pretrained on its inputs alone."""
    accepted = inspect.signature(model_class.forward).parameters
    learns = any(word in parameter for parameter in accepted for word in _LEARNED_FROM)
    return learns or model_class.__name__.endswith("ForPreTraining")


def refuses(model_class: Any) -> bool:
    """Whether a class raises an error as soon as it is given labels."""
    source = inspect.getsource(model_class.forward)
    return re.search(rf'raise \w+\(\s*f?"({_NOT_TRAINED})', source) is not None


def positions_of(kind: str) -> int:
    """The longest text of a type, `LENGTH` where its configuration does not say."""
    from transformers.models.auto import configuration_auto

    try:
        text = configuration_auto.CONFIG_MAPPING[kind]().get_text_config()
    except Exception:  # noqa: BLE001 - building the model says what is wrong
        return LENGTH
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else LENGTH


def traced(model: Any, batch: Any, name: str) -> dict[str, Any]:
    """What became of one model."""
    from estimator.graph.trace.trace import trace_graph

    graph = trace_graph(model, batch, name=name)
    return {
        "status": "ok",
        "class": type(model).__name__,
        "ops": len(graph.ops),
        "parameters": graph.parameter_count,
        "batch_free": graph.other_batch is not None,
        "assumptions": list(graph.assumptions),
        "unknown_ops": list(graph.unknown_ops),
    }


if __name__ == "__main__":
    answer(look_at_timm if sys.argv[1] == "timm" else look_at_transformers)
