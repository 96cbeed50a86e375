"""SGLang's out-of-tree platform for CPUs: native PyTorch paths, no Triton, no sgl_kernel."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


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
