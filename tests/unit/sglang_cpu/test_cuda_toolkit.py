"""CUDA's toolkit for an engine, on machines that have it, have its packages only, or neither."""

import subprocess
from pathlib import Path

import pytest

from forgemq_sglang_cpu.cuda_toolkit import ToolkitError, toolkit_environment

SOURCE = """
#include <cuda/std/type_traits>
#include <cuda_bf16.h>
__global__ void add(float* values) { values[threadIdx.x] += 1; }
extern "C" void run(float* values) { add<<<1, 32>>>(values); }
"""


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def machine(folder: Path) -> dict[str, str]:
    """The environment of a machine with a C++ compiler and no toolkit."""
    program(folder / "programs", "c++")
    return {"PATH": str(folder / "programs"), "XDG_CACHE_HOME": str(folder / "caches")}


def packages(folder: Path) -> Path:
    """A folder in the form of CUDA's packages."""
    program(folder / "bin", "nvcc")
    for name in ("include", "nvvm", "lib"):
        (folder / name).mkdir()
    for name in ("libcudart.so.13", "libcudart_static.a"):
        (folder / "lib" / name).write_text(name)
    return folder


def test_a_machine_with_a_toolkit_is_left_as_it_is(tmp_path: Path) -> None:
    alone = machine(tmp_path)
    source = packages(tmp_path / "packages")
    absent = tmp_path / "absent"
    named = alone | {"CUDA_HOME": "/opt/cuda"}
    assert toolkit_environment(named, installed=absent, packaged=source) == {}
    program(tmp_path / "installed" / "bin", "nvcc")
    found = toolkit_environment(alone, installed=tmp_path / "installed", packaged=source)
    assert found == {}
    program(tmp_path / "programs", "nvcc")
    assert toolkit_environment(alone, installed=absent, packaged=source) == {}


def test_packages_are_linked_once_in_the_form_of_a_toolkit(tmp_path: Path) -> None:
    source = packages(tmp_path / "packages")
    alone = machine(tmp_path) | {"NVCC_APPEND_FLAGS": "-O3"}
    made = toolkit_environment(alone, installed=tmp_path / "absent", packaged=source)
    home = Path(made["CUDA_HOME"])
    assert made["NVCC_APPEND_FLAGS"] == "-O3 -DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
    assert (home / "bin" / "nvcc").samefile(source / "bin" / "nvcc")
    assert (home / "lib64" / "libcudart.so").read_text() == "libcudart.so.13"
    assert (home / "lib" / "libcudart_static.a").read_text() == "libcudart_static.a"
    assert (home / "lib64" / "stubs").is_dir()
    assert toolkit_environment(alone, installed=tmp_path / "absent", packaged=source) == made
    assert list(home.parent.iterdir()) == [home]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(ToolkitError, match=r"needs a C\+\+ compiler: the PATH has no g\+\+-99"):
        toolkit_environment({"PATH": str(tmp_path), "CXX": "g++-99"}, installed=absent)
    with pytest.raises(
        ToolkitError, match=r"neither CUDA_HOME, the PATH, .*absent nor the package"
    ):
        toolkit_environment(machine(tmp_path), installed=absent, packaged=absent)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_locked_packages_compile_and_link_a_kernel(tmp_path: Path) -> None:
    """As SGLang's builds do: the compiler of CUDA, then the C++ compiler with lib64."""
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)}
    environ |= toolkit_environment(environ, installed=tmp_path / "absent")
    home = environ["CUDA_HOME"]
    (tmp_path / "add.cu").write_text(SOURCE)
    hopper = "-gencode=arch=compute_90a,code=sm_90a"
    compiler = [f"{home}/bin/nvcc", hopper, "-std=c++17", "-Xcompiler", "-fPIC"]
    for command in (
        [*compiler, "-c", "add.cu", "-o", "add.o"],
        ["c++", "-shared", "add.o", f"-L{home}/lib64", "-lcudart", "-o", "add.so"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert b"libcudart.so.13" in (tmp_path / "add.so").read_bytes()
