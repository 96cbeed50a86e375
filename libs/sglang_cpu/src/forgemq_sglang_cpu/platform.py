"""SGLang's out-of-tree platform for CPUs: native PyTorch paths, no Triton, no sgl_kernel."""

from collections.abc import Callable

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from forgemq_sglang_cpu.speculation import drafts


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang has no types
    """Makes layers use their `forward_native` methods: SGLang's wheel has no CPU kernels.

    A subclass because SGLang accepts only subclasses of its platform.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=False)

    def is_pin_memory_available(self, device: object = None) -> bool:
        """False: pinning memory needs an accelerator."""
        del device
        return False

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled dot product attention."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Suffix of the `forward_*` method that layers use."""
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether `speculation.py` has what the algorithm needs; SGLang refuses others by name."""
        return drafts(algorithm)

    def get_speculative_cache_locs_fn(self) -> Callable[..., object]:
        """Cache slots of drafted tokens."""
        from forgemq_sglang_cpu.speculation import cache_locations

        return cache_locations

    def get_speculative_worker_cls(self, algorithm: str) -> None:
        """None: SGLang's own worker, with chains in plain torch in place of its kernels."""
        del algorithm
        # Asked only by an engine that speculates, before its first drafted token.
        from forgemq_sglang_cpu.speculative_engine import install

        install()
