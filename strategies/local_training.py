"""Local training: every client trains on its own nodes alone; the baseline of all methods.

Round ``t``:

1. client ``i``: ``E`` steps of Adam on the cross-entropy of its training nodes;
2. client -> server: measurements of its own model. No array travels, in either direction.

All clients begin with the same first weights, drawn by the run's seed.
"""

from dataclasses import dataclass

from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.rules import choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleMethod

APP = "local"


@dataclass
class LocalSection(TrainingSection):
    """Settings of the clients' training."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 5e-3  # by validation: docs/compared.md


@dataclass
class LocalConfig(ModuleRunConfig):
    """Everything that a run of local training needs to be repeated."""

    app: str = APP
    strategy: LocalSection = section(LocalSection)

    def validate(self) -> None:
        super().validate()
        self.privacy.refuse_with(f"app={APP}", "noise is for what clients send, and they send none")


class LocalMethod(ModuleMethod[LocalConfig]):
    """Local training for the command line and the apps."""

    name, schema = APP, LocalConfig
    heterophily = "clients train a GCN, which smooths over edges; not tried on such graphs here"
    tables = ("personalised", "links")
    needs_variety = False  # clients are alone already

    def local(self, config: LocalConfig) -> tuple[str, ...]:
        return ("*",)


METHOD = LocalMethod()
