"""The Kubernetes files: every field exists, the autoscaler understands them, and their numbers fit together."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import ray
import yaml

from tests.cluster.fields import faults, load_types
from tests.support.runs import REPOSITORY

FILES = ["kuberay.yaml", "kuberay-job.yaml"]


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((REPOSITORY / "cluster" / name).read_text())}


def cluster_spec(name: str) -> dict[str, Any]:
    found = documents(name)
    return found["RayCluster"]["spec"] if "RayCluster" in found else found["RayJob"]["spec"]["rayClusterSpec"]


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("name", FILES)
def test_every_field_is_one_that_the_api_has(name):
    types = load_types()
    found = documents(name)
    assert [line for each in found.values() for line in faults(each, types)] == []
    assert "RayCluster" in found or "RayJob" in found


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "workerGroupSpecs", 0, "minReplica"), 0, "minReplica: no such field"),
        (("spec", "workerGroupSpecs", 0, "maxReplicas"), "8", "'8' is not integer"),
        (("spec", "autoscalerOptions", "version"), "v3", "'v3' is not v1|v2"),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "0 is not string"),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "resources", "limits", "cpu"), "4 CPU", "quan"),
        (("spec", "headGroupSpec", "template", "spec", "volumes"), {}, "a list is wanted"),
    ],
)  # fmt: skip
def test_mistakes_are_found(path, value, fault):
    document = deepcopy(documents("kuberay.yaml")["RayCluster"])
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(fault in line for line in faults(document, load_types()))


def test_a_missing_field_is_found():
    document = deepcopy(documents("kuberay.yaml")["RayCluster"])
    del document["spec"]["headGroupSpec"]
    assert faults(document, load_types()) == ["RayCluster.spec.headGroupSpec: missing"]


@pytest.mark.parametrize("name", FILES)
def test_rays_autoscaler_sees_the_gpu_workers_and_a_head_without_cpus(name):
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    resource = {"metadata": {"name": "raydz", "namespace": "default"}, "spec": cluster_spec(name)}
    derived = _derive_autoscaling_config_from_ray_cr(resource)
    types = derived["available_node_types"]
    head = types.pop(derived["head_node_type"])
    assert head["resources"]["CPU"] == 0
    assert {key: (kind["min_workers"], kind["max_workers"]) for key, kind in types.items()} == {"gpu-spot": (0, 8)}
    (worker,) = types.values()
    assert (worker["resources"]["GPU"], worker["resources"]["CPU"], worker["idle_timeout_s"]) == (8, 90, 300)


def test_both_files_describe_the_same_cluster():
    assert cluster_spec("kuberay.yaml") == cluster_spec("kuberay-job.yaml")


@pytest.mark.parametrize("name", FILES)
def test_versions_are_those_that_are_installed(name):
    spec = cluster_spec(name)
    assert spec["rayVersion"] == ray.__version__
    assert all(each["image"].endswith(f":{ray.__version__}") for pod in pods(spec) for each in pod["containers"])


@pytest.mark.parametrize("name", FILES)
def test_volumes_are_mounted_where_ray_writes(name):
    for pod in pods(cluster_spec(name)):
        (container,) = pod["containers"]
        volumes = {each["name"]: each["emptyDir"] for each in pod["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        assert mounts["/dev/shm"]["medium"] == "Memory" and "sizeLimit" in mounts["/tmp/ray"]
        assert pod["serviceAccountName"] == documents("kuberay.yaml")["ServiceAccount"]["metadata"]["name"]


def test_the_drain_ends_before_the_pod_is_killed_and_before_spot_takes_the_node():
    (worker,) = pods(cluster_spec("kuberay.yaml"))[1:]
    (container,) = worker["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    drain_s, grace_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]), worker["terminationGracePeriodSeconds"]
    assert drain_s + 15 <= grace_s <= 120
    assert container["lifecycle"]["preStop"]["exec"]["command"][:2] == ["/bin/sh", "-c"]


def test_the_drain_signals_ray_start_and_neither_itself_nor_the_shell_around_ray():
    (worker,) = pods(cluster_spec("kuberay.yaml"))[1:]
    script = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
    pattern = re.search(r"pkill -TERM -f '([^']+)'", script)
    assert pattern is not None
    matches = re.compile(pattern[1]).search
    assert matches("/home/ray/anaconda3/bin/python /home/ray/anaconda3/bin/ray start --address=raydz:6379 --block")
    assert not matches(f"/bin/sh -c {script}")
    assert not matches("/bin/bash -c -- ulimit -n 65536; ray start --address=raydz:6379 --block")


def test_the_job_survives_its_head_and_has_time_to_save():
    spec = documents("kuberay-job.yaml")["RayJob"]["spec"]
    assert (
        spec["backoffLimit"] > 0 and "run.name=" in spec["entrypoint"] and "checkpoint.dir=s3://" in spec["entrypoint"]
    )
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    head = cluster_spec("kuberay-job.yaml")["headGroupSpec"]["template"]["spec"]
    assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) < head["terminationGracePeriodSeconds"]


def test_what_the_operator_refuses_of_a_job_is_not_there():
    """Rules beyond single fields, from KubeRay's reference."""
    spec = documents("kuberay-job.yaml")["RayJob"]["spec"]
    assert spec["submissionMode"] == "SidecarMode", "for which the next two lines hold"
    assert not {"clusterSelector", "submitterPodTemplate", "submitterConfig"} & set(spec)
    assert cluster_spec("kuberay-job.yaml")["headGroupSpec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["ttlSecondsAfterFinished"] > 0 and spec["shutdownAfterJobFinishes"], "the first needs the second"
    assert "deletionStrategy" not in spec, "which excludes the two above"
    assert not spec["rayClusterSpec"]["authOptions"].get("enableK8sTokenAuth"), "of clusters alone"
