"""Bytes that the histories and tasks of open groups take, counted as they change."""


class HeldBytes:
    """A total that everything counted in it raises and lowers."""

    def __init__(self) -> None:
        self.total = 0


class HeldPart:
    """What one part has put into a total, until it is released."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self.size_bytes = 0

    def grow(self, count: int) -> None:
        """Count more bytes."""
        self.size_bytes += count
        self._held.total += count

    def release(self) -> None:
        """Take everything out of the total; what grows afterwards counts nowhere."""
        self._held.total -= self.size_bytes
        self._held = HeldBytes()
