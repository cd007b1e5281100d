"""How well a model serves the users of devices, as the devices themselves say: the other half of ``FairStrategy``."""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fairfold.flower.rounds import Hearing, OpenRound
from fairfold.simulate.result import Quality, RoundReport
from fairfold.values import BYTES

if TYPE_CHECKING:
    from fairfold.flower.nodes import Node, Nodes
    from fairfold.flower.record import Record
    from fairfold.settings import Settings

log = logging.getLogger("fairfold.flower")


class Judging(Hearing):
    """Evaluation on devices; what it asks of a strategy is what :class:`FairStrategy` has."""

    if TYPE_CHECKING:
        settings: Settings
        nodes: Nodes
        evaluate: bool
        _record: Record | None
        _last_round: int
        _watch: Callable[[RoundReport], None]

        def _cohort(self, present: list[Node], number: int) -> list[Node]: ...

        def _orders(
            self, cohort: list[Node], number: int, kind: str, grid: Grid, *, evaluate: bool
        ) -> list[Message]: ...

    def _evaluation_due(self) -> bool:
        number = self.progress.state.round_number
        return self.evaluate and (number == self._last_round or number % self.settings.run.evaluate_every == 0)

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,  # noqa: ARG002
        config: ConfigRecord,  # noqa: ARG002
        grid: Grid,
    ) -> Iterable[Message]:
        """Where an evaluation is due: ask devices how well the model of their size serves their own users."""
        if self.nodes.plan is None or not self._evaluation_due():
            self._open = OpenRound()
            return []
        number = self.progress.state.round_number - 1  # the hash the devices have just trained with
        cohort = self._cohort(self.nodes.present(grid), number)
        return self._orders(cohort, number, MessageType.EVALUATE, grid, evaluate=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:  # noqa: ARG002
        """The mean over all users, and over those of each size."""
        if not self._open.orders:
            return None
        number = self.progress.state.round_number
        heard = []
        for node, _, reply in self._answers(number, replies, trained=False):
            node.heard(reply.quality)
            if reply.quality is not None:
                heard.append((node.group, reply.quality))
        quality = self._quality(heard)
        report = replace(self.progress.history[-1], quality=quality)
        self.progress.history[-1] = report
        self._tell(report)
        if quality is None:
            return None
        metrics = {self.metric: quality.server}
        for capacity, value in zip(self.plan.capacities, quality.groups, strict=True):
            if value is not None:
                metrics[f"{self.metric} {capacity}"] = value
        return MetricRecord(dict(metrics))

    @property
    def metric(self) -> str:
        """What quality is."""
        return self.settings.metric

    def _quality(self, heard: list[tuple[int, tuple[float, int]]]) -> Quality | None:
        if not heard:
            return None
        groups: list[float | None] = []
        for group in range(len(self.plan.capacities)):
            mine = [quality for where, quality in heard if where == group]
            groups.append(sum(total for total, _ in mine) / sum(users for _, users in mine) if mine else None)
        everybody = [quality for _, quality in heard]
        return Quality(sum(total for total, _ in everybody) / sum(users for _, users in everybody), tuple(groups))

    def _tell(self, report: RoundReport) -> None:
        if self._record is not None:
            self._record.note(report, self.nodes)
        self._watch(report)

    def summary(self) -> None:
        """Log what is about to run."""
        sizes = [held.size() * BYTES for held in self.plan.assignments(0)]
        served = ", ".join(
            f"{capacity}: {size} bytes" for capacity, size in zip(self.plan.capacities, sizes, strict=True)
        )
        log.info("%s, %s, sizes %s", self.settings.subspace.method, self.settings.algorithm.kind, served)
        log.debug("settings %s", json.dumps(self.settings.plain()))
