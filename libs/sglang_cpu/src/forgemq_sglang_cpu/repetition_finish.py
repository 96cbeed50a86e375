"""Why a generation that repeats itself ended, in the form of SGLang's own reasons."""

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_LENGTH


class FinishRepetition(FINISH_LENGTH):  # type: ignore[misc]  # sglang has no types
    """A limit ended the output, as for clients that know no other reason; `repeated` says which."""

    def to_json(self) -> dict[str, Any]:
        """As `finish_reason` of the answer."""
        return {**super().to_json(), "repeated": self.length}
