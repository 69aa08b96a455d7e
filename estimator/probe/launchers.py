"""Write the command, or the manifest, that starts a probe on every node of a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from textwrap import dedent, indent
from typing import Literal

from estimator.probe.discovery import DEFAULT_PORT
from estimator.probe.launch_secret import MAKE_ONE, VARIABLE

Cluster = Literal["slurm", "mpi", "k8s"]

# Every launch has a secret of its own, made where it starts; no text holds one.
_EXPORT = f'export {VARIABLE}="$({MAKE_ONE})"\n'


def launch_text(
    cluster: Cluster, *, nodes: int, devices: int, on_gpus: bool, options: Sequence[str]
) -> str:
    """What to run, or to apply, to probe `nodes` nodes with `devices` ranks on each.

    `options` go to the probe. Rank 0 writes the profile on the first node.

    >>> print(launch_text("slurm", nodes=2, devices=8, on_gpus=True, options=("--name", "h100")))
    export ESTIMATOR_PROBE_SECRET="$(python -c 'import secrets; print(secrets.token_hex(32))')"
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --cpu-bind=none \\
      --kill-on-bad-exit=0 --wait=0 python -m estimator.probe --name h100
    """
    return _WRITERS[cluster](nodes, devices, on_gpus, shlex.join(options))


def _slurm(nodes: int, devices: int, on_gpus: bool, options: str) -> str:
    # The others go on where one task dies; cores are shared out by the probe itself.
    gpus = f" --gpus-per-node={devices}" if on_gpus else ""
    # srun hands the environment on (its default, --export=ALL).
    return (
        f"{_EXPORT}"
        f"srun --nodes={nodes} --ntasks-per-node={devices}{gpus} --exclusive --cpu-bind=none \\\n"
        f"  --kill-on-bad-exit=0 --wait=0 python -m estimator.probe {options}".rstrip()
    )


def _mpi(nodes: int, devices: int, _on_gpus: bool, options: str) -> str:
    # Open MPI 4 and 5 alike: https://docs.open-mpi.org, "Scheduling processes across hosts".
    return (
        f"# On the first node of the file HOSTS, with a line 'NODE slots={devices}' for each:\n"
        f"{_EXPORT}"
        f"mpirun -np {nodes * devices} --hostfile HOSTS --map-by ppr:{devices}:node "
        "--bind-to none \\\n"
        f'  -x MASTER_ADDR="$(hostname)" -x MASTER_PORT={DEFAULT_PORT} '
        f"-x {VARIABLE} \\\n"
        f"  python -m estimator.probe {options}".rstrip()
    )


def _kubernetes(nodes: int, devices: int, on_gpus: bool, options: str) -> str:
    # https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/; a backoff limit for
    # each index (1.29 and later) leaves the others running.
    if "--json" not in options.split():
        options = f"{options} --json"
    limits = f"\nresources: {{limits: {{nvidia.com/gpu: {devices}}}}}" if on_gpus else ""
    manifest = dedent(
        f"""\
        # Give all ranks one secret: {MAKE_ONE} |
        #   kubectl create secret generic estimator-probe --from-file=secret=/dev/stdin
        # Put an image with torch and throughput-estimator in place of IMAGE, kubectl apply -f it,
        # and once the job is complete keep the profile, all that rank 0's pod prints:
        #   kubectl logs --tail=-1 > PROFILE.json \\
        #     -l job-name=estimator-probe,batch.kubernetes.io/job-completion-index=0
        # What it says beside that is in: kubectl describe pod -l job-name=estimator-probe
        apiVersion: v1
        kind: Service
        metadata: {{name: estimator-probe}}
        spec:
          clusterIP: None
          publishNotReadyAddresses: true
          selector: {{job-name: estimator-probe}}
        ---
        apiVersion: batch/v1
        kind: Job
        metadata: {{name: estimator-probe}}
        spec:
          completions: {nodes}
          parallelism: {nodes}
          completionMode: Indexed
          backoffLimitPerIndex: 0
          template:
            metadata: {{labels: {{app: estimator-probe}}}}
            spec:
              subdomain: estimator-probe
              restartPolicy: Never
              affinity:
                podAntiAffinity:
                  requiredDuringSchedulingIgnoredDuringExecution:
                  - topologyKey: kubernetes.io/hostname
                    labelSelector: {{matchLabels: {{app: estimator-probe}}}}
              volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
              containers:
              - name: probe
                image: IMAGE
                env:
                - name: {VARIABLE}
                  valueFrom: {{secretKeyRef: {{name: estimator-probe, key: secret}}}}
                volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
                command: [sh, -c]
                args:
                - >-
                  exec torchrun --nnodes {nodes} --node-rank $JOB_COMPLETION_INDEX
                  --nproc-per-node {devices} --master-addr estimator-probe-0.estimator-probe
                  --master-port {DEFAULT_PORT} -m estimator.probe {options}
                  2>/dev/termination-log
        """
    )
    image = "        image: IMAGE"
    return manifest.replace(image, image + indent(limits, " " * 8)).rstrip()


_WRITERS: dict[Cluster, Callable[[int, int, bool, str], str]] = {
    "slurm": _slurm,
    "mpi": _mpi,
    "k8s": _kubernetes,
}
