"""The Tiltfile calls what Tilt has, builds every service and applies the local overlay."""

import inspect
from typing import Any

import pytest
import starlark

from tests.architecture.rendered import ROOT, SERVICES, pods

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
            calls.append((_name, signature(_name).bind(*args, **kwargs).arguments))
            return args[0] if args else None

        module.add_callable(name, record)
    module["TRIGGER_MODE_MANUAL"] = 1
    dialect = starlark.Dialect.extended()
    dialect.enable_top_level_stmt = True
    syntax = starlark.parse("Tiltfile", text, dialect=dialect)
    starlark.eval(module, syntax, starlark.Globals.standard())
    return calls


def of(calls: list[Call], name: str) -> list[dict[str, Any]]:
    return [arguments for called, arguments in calls if called == name]


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


@pytest.mark.parametrize(
    "wrong",
    ['k8s_resource("console", port_forward = ["8080:8080"])', 'docker_build("forgemq-console")'],
)
def test_a_parameter_that_tilt_does_not_have_or_one_that_it_misses_is_an_error(wrong: str):
    with pytest.raises(starlark.StarlarkError, match="argument"):
        evaluated(wrong)
