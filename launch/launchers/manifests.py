"""Kubernetes: a LeaderWorkerSet, or two StatefulSets, with services, probes and a drain.

The server goes on when a pod dies, and takes it in again when it is back, so nothing here may restart the others:
restartPolicy None for a LeaderWorkerSet. There the workers' StatefulSet belongs to the leader's pod, and goes when that
pod is deleted; two StatefulSets of our own survive that too.
"""

from __future__ import annotations

from typing import Any, Literal

import yaml

from launch.launchers.plan import LaunchPlan

Kind = Literal["statefulset", "lws"]
Document = dict[str, Any]
ENDPOINT_SECONDS = 5  # until services send a pod no more requests once it is to end
LEAVE_SECONDS = 20  # beyond the drain
REASONS = {
    "PodDisruptionBudget": "One node at a time, when nodes are drained: the others serve on.",
    "LeaderWorkerSet": "restartPolicy None: a pod that dies comes back alone, and joins the others, which serve on.",
    "StatefulSet": "Pods start together (Parallel): the head waits for the others, and they look for it.",
    "Service": "publishNotReadyAddresses: nodes find the head by name before it is ready.",
}


def manifests(plan: LaunchPlan, kind: Kind) -> str:
    """YAML documents for `kubectl apply -f -`."""
    sets = [_worker_set(plan)] if kind == "lws" else _stateful_sets(plan)
    peers = [] if kind == "lws" else [_peers(plan)]  # a LeaderWorkerSet gets that service from its controller
    documents = [*peers, _clients(plan), *sets, _budget(plan)]
    parts = []
    for document in documents:
        reason = REASONS.get(document["kind"], "") if document["metadata"]["name"] != plan.name + "-http" else ""
        text = yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120)
        parts.append(f"# {reason}\n{text}" if reason else text)
    return "---\n".join(parts)


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    def ignore_aliases(self, data: object) -> bool:
        return True


def _labels(plan: LaunchPlan, role: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": plan.name}
    return labels if role is None else {**labels, "app.kubernetes.io/component": role}


def _peers(plan: LaunchPlan) -> Document:
    """The names of the pods: a headless service."""
    ports = [{"name": "supervisors", "port": plan.rpc_port}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(plan), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": plan.name}, "spec": spec}


def _clients(plan: LaunchPlan) -> Document:
    ports = [{"name": "http", "port": plan.port, "targetPort": "http"}]
    spec = {"selector": _labels(plan, "head"), "ports": ports}
    metadata = {"name": f"{plan.name}-http", "labels": _labels(plan)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _budget(plan: LaunchPlan) -> Document:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(plan)}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": plan.name},
        "spec": spec,
    }


def _worker_set(plan: LaunchPlan) -> Document:
    """LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX are set in every container: nothing is said here."""
    template: Document = {
        "size": plan.nodes,
        "restartPolicy": "None",
        "leaderTemplate": _pod(plan, "head", plan.words()),
        "workerTemplate": _pod(plan, "worker", plan.words()),
    }
    spec = {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": plan.name, "labels": _labels(plan)},
        "spec": spec,
    }


def _stateful_sets(plan: LaunchPlan) -> list[Document]:
    """Node 0, and the others, whose pods are numbered from 1 on."""
    head = f"{plan.name}-head-0.{plan.name}"
    sets = [_stateful_set(plan, "head", 1, plan.words(0, head))]
    if plan.nodes > 1:
        workers = _stateful_set(plan, "worker", plan.nodes - 1, plan.words("$(NODE_RANK)", head))
        workers["spec"]["ordinals"] = {"start": 1}
        pod = workers["spec"]["template"]["spec"]
        source = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
        for container in (*pod["initContainers"], *pod["containers"]):
            container["env"] = [{"name": "NODE_RANK", "valueFrom": source}, *container.get("env", [])]
        sets.append(workers)
    return sets


def _stateful_set(plan: LaunchPlan, role: str, replicas: int, words: list[str]) -> Document:
    spec = {
        "serviceName": plan.name,
        "replicas": replicas,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(plan, role)},
        "template": _pod(plan, role, words),
    }
    metadata = {"name": f"{plan.name}-{role}", "labels": _labels(plan)}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _pod(plan: LaunchPlan, role: str, words: list[str]) -> Document:
    spec: Document = {
        # More than services need to forget the pod, the drain, and the end of the ranks.
        "terminationGracePeriodSeconds": ENDPOINT_SECONDS + plan.drain + LEAVE_SECONDS,
        # Alone: a pod that comes back finds the others at work, and they do not check again.
        "initContainers": [_container(plan, "doctor", [*plan.program, "doctor", "--alone", *words])],
        "containers": [_serving(plan, role, [*plan.program, "serve", *words])],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if plan.model is not None:
        source = {"path": plan.model, "type": "Directory"}  # on each node's own disk
        spec["volumes"].append({"name": "model", "hostPath": source})
    return {"metadata": {"labels": _labels(plan, role)}, "spec": spec}


def _container(plan: LaunchPlan, name: str, command: list[str]) -> Document:
    limits: Document = {"memory": plan.memory} if plan.memory else {}
    if plan.cpus:
        limits["cpu"] = str(plan.cpus)
    if plan.gpus:
        limits["nvidia.com/gpu"] = str(plan.gpus)
    container: Document = {"name": name, "image": plan.image, "command": command}
    if limits:
        container["resources"] = {"limits": limits}
    container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if plan.model is not None:
        container["volumeMounts"].append({"name": "model", "mountPath": plan.model, "readOnly": True})
    return container


def _serving(plan: LaunchPlan, role: str, command: list[str]) -> Document:
    """Only the head answers HTTP; a worker's process ends when it cannot serve."""
    container = _container(plan, "moesaic", command)
    keys = [("MOESAIC_API_KEY", "api-key"), ("MOESAIC_ADMIN_KEY", "admin-key")]
    container["env"] = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{plan.name}-keys", "key": key, "optional": True}}}
        for name, key in keys
    ]
    if role != "head":
        return container
    container["ports"] = [{"name": "http", "containerPort": plan.port}]
    container["startupProbe"] = _probe("/health", period=5, failures=max(1, plan.startup // 5))
    container["readinessProbe"] = _probe("/ready", period=5, failures=1)
    container["livenessProbe"] = _probe("/live", period=10, failures=6)
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(ENDPOINT_SECONDS)]}}}
    return container


def _probe(path: str, period: int, failures: int) -> Document:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
