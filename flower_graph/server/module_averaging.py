"""The server's half for ``ModuleClient``: any module, averaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from flower_graph.client.module_client import ModuleSettings, first_module
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.wire.arrays import encode_array
from flower_graph.wire.averaging import Measured

__all__ = ["ModuleFedAvg"]


class ModuleFedAvg(ReportedFedAvg):
    """``ReportedFedAvg`` for ``ModuleClient``: reports its figures, makes the first weights.

    Parameters
    ----------
    make_module, settings
        As the clients have them.
    how, classes
        The config's section ``strategy`` and how many classes there are, for a subclass.
    **more
        As for ``ReportedFedAvg``, but for the seed, which is the settings'.
    """

    def __init__(
        self,
        make_module: Callable[[], nn.Module],
        settings: ModuleSettings,
        *,
        how: Any = None,
        classes: int = 0,
        **more: Any,
    ) -> None:
        super().__init__(seed=settings.seed, **more)
        self.make_module, self.settings = make_module, settings
        self.how, self.classes = how, classes

    def first_arrays(self) -> ArrayRecord:
        """Give what the first round sends."""
        state = first_module(self.make_module, self.settings.seed).state_dict()
        return ArrayRecord(
            {
                name: encode_array(name, value.cpu().numpy())
                for name, value in state.items()
                if self.settings.is_shared(name)
            }
        )

    def fixed_settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        return super().fixed_settings() | self.settings._asdict()

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        """Turn Flower's means of what clients measured into the fields of a report."""
        return Measured.from_config(evaluated).to_report() | {"regulariser": math.nan}
