"""The Tiltfile calls what Tilt has, builds every service and applies the local overlay."""

import inspect
import tomllib
from pathlib import PurePath
from typing import Any

import kubernetes_validate
import pytest
import starlark

from tests.architecture.rendered import ROOT, SERVICES, environ, manifests, pods

BUILTINS = {
    "docker_build": (
        "ref context",
        "build_args dockerfile dockerfile_contents live_update match_in_env_vars ignore only "
        "entrypoint target ssh network secret extra_tag container_args cache_from pull platform",
    ),
    "k8s_resource": (
        "",
        "workload new_name port_forwards extra_pod_selectors trigger_mode resource_deps objects "
        "auto_init pod_readiness links labels discovery_strategy",
    ),
    "k8s_yaml": ("yaml", "allow_duplicates"),
    "kustomize": ("paths", "kustomize_bin flags"),
    "local": ("command", "quiet command_bat echo_off env dir stdin"),
    "local_resource": (
        "name cmd",
        "deps trigger_mode resource_deps ignore auto_init serve_cmd cmd_bat serve_cmd_bat "
        "allow_parallel links tags env serve_env readiness_probe dir serve_dir labels",
    ),
    "run": ("cmd", "trigger"),
    "sync": ("local_path remote_path", ""),
}
"""Parameters that Tilt's functions require, and those that they also take, in their order: those of
its API reference (docs.tilt.dev/api.html)."""

Call = tuple[str, dict[str, Any]]


def signature(name: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required, others = (each.split() for each in BUILTINS[name])
    return inspect.Signature(
        [inspect.Parameter(each, kind) for each in required]
        + [inspect.Parameter(each, kind, default=None) for each in others]
    )


def evaluated(text: str) -> list[Call]:
    """What a Tiltfile calls, with the arguments by their names, as Tilt would bind them."""
    calls: list[Call] = []
    module = starlark.Module()
    for name in BUILTINS:

        def record(*args, _name=name, **kwargs):
            bound = signature(_name).bind(*args, **kwargs).arguments
            calls.append((_name, bound))
            return " to ".join([_name, *bound.values()]) if _name in {"run", "sync"} else args[0]

        module.add_callable(name, record)
    module["TRIGGER_MODE_MANUAL"] = 1
    dialect = starlark.Dialect.extended()
    dialect.enable_top_level_stmt = True
    syntax = starlark.parse("Tiltfile", text, dialect=dialect)
    starlark.eval(module, syntax, starlark.Globals.standard())
    return calls


def of(calls: list[Call], name: str) -> list[dict[str, Any]]:
    return [arguments for called, arguments in calls if called == name]


@pytest.mark.slow
def test_the_tiltfile_builds_every_service_and_applies_the_local_overlay():
    calls = evaluated((ROOT / "Tiltfile").read_text())
    built = of(calls, "docker_build")
    images = {each["ref"] for each in built}
    assert images >= {f"forgemq-{service}" for service in SERVICES}
    for options in built:
        for line in (ROOT / options["dockerfile"]).read_text().splitlines():
            if line.startswith("COPY") and "--from" not in line:
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists(), line
                    assert any(source.startswith(each) for each in options["only"]), line
    (overlay,) = (ROOT / each["paths"] for each in of(calls, "kustomize"))
    assert (overlay / "kustomization.yaml").read_text().count("../overlays/local") == 1
    used = {
        container["image"].partition(":")[0]
        for pod in pods(overlay).values()
        for container in (*pod.get("initContainers", ()), *pod["containers"])
    }
    assert {image for image in used if image.startswith("forgemq-")} == images
    resources = {each["workload"] for each in of(calls, "k8s_resource")}
    assert resources == set(pods(overlay))
    waited_for = {d for _, options in calls for d in options.get("resource_deps", ())}
    assert waited_for <= resources


@pytest.mark.slow
def test_what_tilt_applies_is_valid_and_runs_as_restricted_as_the_local_overlay():
    (overlay,) = (
        ROOT / c["paths"] for c in of(evaluated((ROOT / "Tiltfile").read_text()), "kustomize")
    )
    for manifest in manifests(overlay):
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    for name, pod in pods(overlay).items():
        before = pods(ROOT / "deploy/kubernetes/overlays/local")[name]
        assert pod["securityContext"] == before["securityContext"]
        given = {each["name"]: each["securityContext"] for each in before["containers"]}
        assert {c["name"]: c["securityContext"] for c in pod["containers"]} == given


def test_a_changed_file_of_a_service_goes_where_its_pod_runs_it_from():
    calls = evaluated((ROOT / "Tiltfile").read_text())
    contents = tomllib.loads((ROOT / "deploy/images/contents.toml").read_text())
    (overlay,) = (ROOT / each["paths"] for each in of(calls, "kustomize"))
    steps = {
        each["ref"].removeprefix("forgemq-"): each["live_update"]
        for each in of(calls, "docker_build")[:-1]
    }
    updated = {name for name, each in steps.items() if each}
    assert updated == set(SERVICES) - {"launcher"}
    for name in updated:
        (container,) = (c for c in pods(overlay)[name]["containers"] if c["name"] == name)
        _, script, image, copy = container["command"]
        mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
        assert (image, environ(overlay, container)["PYTHONPATH"]) == ("/opt/forgemq", copy)
        assert mounts[str(PurePath(copy).parent)].get("readOnly", False) is False
        assert str(PurePath(script).parent) in mounts
        *synced, last = steps[name]
        assert last == "run to kill -HUP 1"
        assert set(synced) >= {
            f"sync to {each}/src to {copy}" for each in contents[name]["folders"]
        }
        for each in synced:
            assert (ROOT / each.split(" to ")[1]).is_dir(), each


@pytest.mark.parametrize(
    "wrong",
    ['k8s_resource("console", port_forward = ["8080:8080"])', 'docker_build("forgemq-console")'],
)
def test_a_parameter_that_tilt_does_not_have_or_one_that_it_misses_is_an_error(wrong: str):
    with pytest.raises(starlark.StarlarkError, match="argument"):
        evaluated(wrong)
