"""Measures what the actions of a pipeline take, and has schedules searched for it."""

from __future__ import annotations

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.per_micro_batch import PerMicroBatch
from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.stopwatch import ActionRecording
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.measured import durations

#: Mini-batches before the measurement, in which memory is allocated and kernels are chosen.
_WARM_UP = 1
#: Mini-batches that are measured with split backwards, and then with whole ones.
_SPLIT, _WHOLE = 2, 2


class Measuring:
    """Measures the first mini-batches of a training.

    Args:
        rank: The stages of this rank.
        schedules: Gets what was measured.
        groups: The process groups.
    """

    def __init__(self, rank: Rank, schedules: Schedules, groups: Groups) -> None:
        self._rank, self._schedules, self._groups = rank, schedules, groups
        self._is_wanted = schedules.depends_on_costs and groups.stages > 1
        self._mini_batches = 0
        self._recording = ActionRecording(rank.executor.watch)

    def end_mini_batch(self, steps: PerMicroBatch) -> None:
        """End a mini-batch that has trained. Collective over all ranks, once."""
        self._mini_batches += 1
        if not self._is_wanted:
            return
        if self._mini_batches == _WARM_UP:
            self._recording.resume()
            self._schedules.splits = "all"
            steps.make_new_schedules()
        elif self._mini_batches == _WARM_UP + _SPLIT:
            self._schedules.splits = "none"
            steps.make_new_schedules()
        elif self._mini_batches == _WARM_UP + _SPLIT + _WHOLE:
            self._is_wanted, self._schedules.splits = False, "some"
            self._recording.pause()
            own_times = durations(self._recording.take())
            own = own_times, self._rank.executor.unsplit, self._rank.links.message_s()
            found = self._groups.pipeline.gather("costs", own)
            found = self._groups.decide("costs", lambda: found)
            times = {key: time for part, _, _ in found for key, time in part.items()}
            message_s = max(time for _, _, time in found)
            self._schedules.costs = Costs.measured(times, len(self._rank.placement), message_s)
            self._schedules.whole = frozenset(stage for _, whole, _ in found for stage in whole)
            steps.make_new_schedules()
