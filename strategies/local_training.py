"""Local training: every client trains on its own nodes alone; the baseline of all methods.

Round ``t``:

1. client ``i``: ``E`` steps of Adam on the cross-entropy of its training nodes;
2. client -> server: measurements of its own model. No array travels, in either direction.

Clients with one network begin with the same first weights, drawn by the run's seed.
"""

from dataclasses import dataclass

from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.schema import section
from flower_graph.method.module_method import ModuleMethod

APP = "local"


@dataclass
class LocalConfig(ModuleRunConfig):
    """Everything that a run of local training needs to be repeated."""

    mixes = True
    no_noise = "noise is for what clients send, and they send none"
    app: str = APP
    strategy: TrainingSection = section(
        # the decay by validation: docs/compared.md
        TrainingSection,
        name=APP,
        local_epochs=3,
        weight_decay=5e-3,
    )


class LocalMethod(ModuleMethod[LocalConfig]):
    """Local training for the command line and the apps."""

    name, schema = APP, LocalConfig
    tables = ("personalised", "links", "mixed")
    needs_variety = False  # clients are alone already
    own_entries = ("*",)


METHOD = LocalMethod()
