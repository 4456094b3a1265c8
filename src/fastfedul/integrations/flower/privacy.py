"""Central differential privacy: Flower's four wrappers under `Recorded`.

A wrapper clips the updates, lets another strategy aggregate them, and adds noise. The
ledger records the updates as they were aggregated, and the noise by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.dp_adaptive_clipping import DifferentialPrivacyAdaptiveBase
from flwr.serverapp.strategy.dp_fixed_clipping import (
    DifferentialPrivacyFixedClippingBase,
)
from flwr.supercore.differential_privacy import compute_stdv
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent

from fastfedul.errors import InvalidInputError
from fastfedul.federation.replies import CheckedReply, RoundDiscardedError
from fastfedul.integrations.flower.arrays import IsBuffer, decoded
from fastfedul.integrations.flower.errors import StrategyRefusedError
from fastfedul.ledger.reader import LedgerReader
from fastfedul.params import Flat, Layout, Params
from fastfedul.records import CentralPrivacy, Model, Round, RoundEntry

Wrapper = DifferentialPrivacyFixedClippingBase | DifferentialPrivacyAdaptiveBase


def inner_of(strategy: Strategy) -> Strategy:
    """Return the strategy that aggregates: the wrapped one, or the given one."""
    if not isinstance(strategy, Wrapper):
        return strategy
    if isinstance(strategy.strategy, Wrapper):
        raise StrategyRefusedError(
            "differential privacy is wrapped in differential privacy; wrap it once"
        )
    return strategy.strategy


def require_no_buffers(arrays: ArrayRecord, rule: IsBuffer) -> None:
    """Raise if a model has buffers, which Flower would clip and add noise to."""
    for name, array in arrays.items():
        if rule(name, array.numpy()):
            raise InvalidInputError(
                f"Flower's differential privacy clips the buffer {name!r:.80} and adds "
                "noise to it; use a network without buffers, such as with GroupNorm"
            )


class Overheard(Strategy):
    """A strategy that remembers the updates it got and the model it returned.

    Attributes:
        inner: The strategy.
        replies: The arrays of each reply, in the order of the replies.
        result: The aggregated arrays.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.weighted_by_key = getattr(inner, "weighted_by_key", "num-examples")
        self.replies: list[ArrayRecord] = []
        self.result: ArrayRecord | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the strategy's messages."""
        found: Iterable[Message] = self.inner.configure_train(
            server_round, arrays, config, grid
        )
        return found

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the strategy's model and metrics."""
        given = list(replies)
        # A copy, because a strategy may empty the records that it aggregates.
        self.replies = [
            ArrayRecord(dict(record))
            for reply in given
            for record in reply.content.array_records.values()
        ]
        arrays, metrics = self.inner.aggregate_train(server_round, given)
        self.result = arrays
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the strategy's messages."""
        found: Iterable[Message] = self.inner.configure_evaluate(
            server_round, arrays, config, grid
        )
        return found

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the strategy's metrics."""
        found: MetricRecord | None = self.inner.aggregate_evaluate(
            server_round, replies
        )
        return found

    def summary(self) -> None:
        """Log the strategy's settings."""
        self.inner.summary()


class PrivateAggregation:
    """A wrapper of Flower for differential privacy, with a strategy that is overheard.

    Args:
        wrapper: The wrapper; its strategy is replaced by one that remembers.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._overheard = Overheard(wrapper.strategy)
        wrapper.strategy = self._overheard
        self._norm = wrapper.clipping_norm

    def resume(self, ledger: LedgerReader) -> None:
        """Go on with the clipping norm and the accounting of the recorded rounds."""
        rounds = ledger.rounds()
        last = rounds[-1].privacy if rounds else None
        adaptive = isinstance(self._wrapper, DifferentialPrivacyAdaptiveBase)
        if last is not None and adaptive:
            self._wrapper.clipping_norm = last.next_clipping_norm
        accountant = getattr(self._wrapper, "accountant", None)
        if accountant is None:
            return
        # A new accountant knows nothing of the rounds before this process; one that was
        # restored with `load_state_dict` may know all of them.
        for round_ in rounds[accountant.num_releases :]:
            if round_.privacy is not None and round_.num_updates:
                accountant.compose(_event(round_, accountant.config.population_size))

    def begin(self) -> None:
        """Note the clipping norm of the round that begins."""
        self._norm = self._wrapper.clipping_norm

    def discard(self, number: int) -> None:
        """Let the wrapper's accountant take the same round again."""
        getattr(self._wrapper, "_pending_events", {}).pop(number, None)

    def aggregated(
        self, number: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the aggregated model without noise, and the metrics.

        Raises:
            RoundDiscardedError: If Flower skips the round.
        """
        self._noisy, metrics = self._wrapper.aggregate_train(number, list(replies))
        if self._noisy is None:
            raise RoundDiscardedError(
                f"round {number} is discarded: Flower's differential privacy wants "
                f"{self._wrapper.num_sampled_clients} replies; after a forgetting, "
                "start again with as many sampled clients as are left"
            )
        return self._overheard.result, metrics

    def clipped(
        self, usable: Iterable[CheckedReply], before: Model
    ) -> list[CheckedReply]:
        """Return replies with the updates that Flower aggregated."""
        layout = before.params.layout
        return [
            replace(own, delta=_flat(record, layout) - before.params.flat)
            for own, record in zip(usable, self._overheard.replies, strict=True)
        ]

    def with_noise(self, round_: Round, layout: Layout) -> Round:
        """Return a round with the noise that Flower added."""
        assert self._noisy is not None
        assert self._overheard.result is not None
        noise = _flat(self._noisy, layout) - _flat(self._overheard.result, layout)
        wrapper = self._wrapper
        # Adaptive wrappers change the norm first and scale the noise with the new one.
        stdev = compute_stdv(
            wrapper.noise_multiplier, wrapper.clipping_norm, wrapper.num_sampled_clients
        )
        privacy = CentralPrivacy(
            clipping_norm=float(self._norm),
            noise_stdev=stdev,
            next_clipping_norm=float(wrapper.clipping_norm),
        )
        return replace(round_, noise=Params(layout, noise), privacy=privacy)


def _event(round_: RoundEntry, population_size: int) -> GaussianPrivacyEvent:
    """Return what a recorded round costs, as Flower's accountants count it.

    Once a client was erased the round has fewer participants, so the multiplier comes
    out smaller than it was and the epsilon larger.
    """
    assert round_.privacy is not None
    return GaussianPrivacyEvent(
        noise_multiplier=round_.privacy.noise_stdev
        * round_.num_updates
        / round_.privacy.clipping_norm,
        sample_size=min(round_.num_updates, population_size),
        population_size=population_size,
    )


def _flat(record: ArrayRecord, layout: Layout) -> Flat:
    arrays = {slot.name: decoded(record[slot.name]) for slot in layout.slots}
    return np.asarray(layout.flatten(arrays), np.float32)
