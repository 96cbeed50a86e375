"""SGLang's out-of-tree platform for CPUs: native PyTorch paths, no Triton, no sgl_kernel."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang has no types
    """Layers take their `forward_native` paths; the wheel has no CPU kernels to offer.

    Inherits because SGLang accepts a platform only as a subclass of its own.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=False)

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Pinning needs an accelerator."""
        del device
        return False

    def get_default_attention_backend(self) -> str:
        """Scaled dot product attention of PyTorch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Which `forward_*` method layers use."""
        return "native"
