"""Reads a few parameters of an engine back after a fast path, and compares them with what was sent.

An engine computes the checksums itself, in the pause. A difference is confirmed by the durable
copy: if the engine holds something else even then, it hashes or stores parameters in a way of its
own (another dtype, quantised weights), and is not asked again.
"""

from collections.abc import Sequence

from forgemq_contracts.weight_samples import others
from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.core.read_back import wrong_parameters
from forgemq_inference.durable import DurableCopies
from forgemq_inference.engine import EngineRefusedError
from forgemq_inference.engine_pair import LaneEngine
from forgemq_telemetry import Telemetry


class ParameterReadBack:
    """Of one lane. `prepare` before the pause, `wrong` in it, `confirm` after the durable copy."""

    def __init__(
        self, engine: LaneEngine, copies: DurableCopies, *, lane: int, telemetry: Telemetry
    ) -> None:
        """Ask nothing yet."""
        self._engine = engine
        self._copies = copies
        self._lane = lane
        self._telemetry = telemetry
        self._is_off = False

    async def prepare(self, published: PublishedWeights) -> tuple[str, ...]:
        """What the engine need not read; () if nothing is to be compared.

        Raises:
            DurableCopyError: nothing says which tensors there are.
        """
        if self._is_off or not published.sampled:
            return ()
        if (await self._engine.server_info()).device != "cpu":
            # There SGLang hashes in another way, which is not known here.
            self._turn_off("the engine is on a GPU")
            return ()
        tensors = await self._copies.tensors(published)
        return others(tensors, [each.name for each in published.sampled])

    async def wrong(self, published: PublishedWeights, leave_out: Sequence[str]) -> tuple[str, ...]:
        """Names of the parameters that the engine holds otherwise than they were sent.

        Raises:
            EngineUnreachableError: the engine does not answer.
        """
        if not leave_out or self._is_off:
            return ()
        try:
            ranks = await self._engine.checksums(leave_out)
        except EngineRefusedError as error:
            self._turn_off(str(error))
            return ()
        names = wrong_parameters(published.sampled, ranks)
        for name in names:
            self._telemetry.event(
                "wrong_tensor", weights=f"{published.lineage}.{published.version}", tensor=name
            )
            self._telemetry.count("inference.wrong_tensors", lane=self._lane, tensor=name)
        return names

    async def confirm(
        self, published: PublishedWeights, leave_out: Sequence[str], *, before: Sequence[str]
    ) -> None:
        """Ask again after the durable copy was loaded because some parameters were wrong."""
        if before and await self.wrong(published, leave_out):
            self._turn_off("the engine holds the durable copy otherwise, too")

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        self._telemetry.event("read_back_off", lane=self._lane, reason=reason)
