"""CUDA's toolkit for an engine: SGLang compiles some of its kernels on the machine that serves.

A machine may have NVIDIA's driver alone. Compiler, headers and libraries come with SGLang as Python
packages, in folders of another form than an installed toolkit has. For such a machine this module
makes a folder of links in that form.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

INSTALLED = Path("/usr/local/cuda")
"""Where the builds of SGLang, FlashInfer and DeepGEMM look for a toolkit that nothing names."""

DRIVER_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)
"""Where the driver's library lies on Debian, on Fedora and in containers."""

ACCEPTS_OLDER_HEADERS = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
"""The locked packages have a compiler of CUDA 13.5 and the runtime of 13.0, for which torch is
built. CUDA's C++ library refuses the pair unless this is defined."""

_FLAGS = "NVCC_APPEND_FLAGS"
"""Environment variable with flags that the compiler adds to its own."""


class ToolkitError(Exception):
    """There is no toolkit, and none can be made of packages."""


def toolkit_environment(
    inherited: Mapping[str, str], *, installed: Path = INSTALLED, packaged: Path | None = None
) -> dict[str, str]:
    """Variables that name a toolkit; {} if the machine has one that builds find by themselves.

    Args:
        inherited: The environment of the engine's start.
        installed: Folder of an installed toolkit.
        packaged: Folder of the packages; None looks for it beside the other packages.

    Raises:
        ToolkitError: says what is missing.
    """
    compiler = (inherited.get("CXX") or "c++").split()[0]
    if not shutil.which(compiler, path=inherited.get("PATH")):
        raise ToolkitError(
            "an engine on a GPU compiles kernels and needs a C++ compiler: the PATH has no "
            f"{compiler}"
        )
    if _has_toolkit(inherited, installed=installed):
        return {}
    source = packaged or _packaged()
    if source is None or not (source / "bin" / "nvcc").is_file():
        raise ToolkitError(
            "an engine on a GPU compiles kernels and needs CUDA 13's toolkit: neither CUDA_HOME, "
            f"the PATH, {installed} nor the package nvidia-cuda-nvcc has its compiler, nvcc"
        )
    try:
        home = _linked(source, caches=_caches(inherited))
    except OSError as error:
        raise ToolkitError(
            f"no folder of links to CUDA's packages could be made: {error}"
        ) from error
    flags = f"{inherited.get(_FLAGS, '')} {ACCEPTS_OLDER_HEADERS}".strip()
    return {"CUDA_HOME": str(home), _FLAGS: flags}


def _has_toolkit(inherited: Mapping[str, str], *, installed: Path) -> bool:
    if inherited.get("CUDA_HOME") or inherited.get("CUDA_PATH"):
        return True
    on_path = shutil.which("nvcc", path=inherited.get("PATH"))
    return on_path is not None or (installed / "bin" / "nvcc").exists()


def _packaged() -> Path | None:
    """The folder of CUDA 13's packages; None if there is none."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    found = (Path(folder) / "cu13" for folder in folders or ())
    return next((folder for folder in found if folder.is_dir()), None)


def _caches(inherited: Mapping[str, str]) -> Path:
    named = inherited.get("XDG_CACHE_HOME")
    return Path(named) if named else Path(inherited.get("HOME") or Path.home()) / ".cache"


def _linked(source: Path, *, caches: Path) -> Path:
    """A folder of links to the packages, made once for each compiler; compiled kernels name it."""
    compiler = source / "bin" / "nvcc"
    status = compiler.stat()
    key = f"{compiler} {status.st_size} {status.st_mtime_ns}"
    target = caches / "forgemq" / f"cuda-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent))
    _link_all(source, made)
    try:
        made.rename(target)
    except OSError:  # Another process was faster.
        shutil.rmtree(made)
    return target


def _link_all(source: Path, made: Path) -> None:
    made.chmod(0o755)
    for name in ("bin", "include", "nvvm"):
        (made / name).symlink_to(source / name)
    libraries, stubs = made / "lib64", made / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    (made / "lib").symlink_to("lib64")
    for file in (source / "lib").iterdir():
        (libraries / file.name).symlink_to(file)
        plain, is_shared, _ = file.name.partition(".so.")
        # A linker looks for the name without a version.
        if is_shared and not (source / "lib" / f"{plain}.so").exists():
            _link_new(libraries / f"{plain}.so", file)
    driver = next((path for path in map(_driver_in, DRIVER_FOLDERS) if path.exists()), None)
    if driver is not None:
        _link_new(stubs / "libcuda.so", driver)


def _driver_in(folder: str) -> Path:
    return Path(folder) / "libcuda.so.1"


def _link_new(link: Path, to: Path) -> None:
    if not os.path.lexists(link):
        link.symlink_to(to)
