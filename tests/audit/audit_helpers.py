"""Small runs to attack, and messages made by hand."""

import math
from collections.abc import Mapping
from pathlib import Path

from flower_graph.apps.cli.audit import audit_run, settings_of
from flower_graph.audit.attacks import Finding, guess_variance

DATA = """
data:
  {name: csbm, nodes: 90, classes: 3, degree: 6, num_features: 40, active: 4,
   split: random, ratios: [0.4, 0.3, 0.3]}
"""
YAML = {
    "nfedgnn": "model: {hidden: 8, user_bias: true}\nrounds: 12\n",
    "fedscem": "partition: {clients: 12, min_nodes: 3, hops: 1}\nmodel: {hidden: 4}\nrounds: 2\n",
    "fedgls": "partition: {clients: 4, method: random}\ngraph: {neighbours: 3}\nrounds: 3\n",
    "ppfl": (
        "judge: {folds: 2, mlp: false}\nmodel: {name: gat}\nrounds: 3\n"
        "partition: {clients: 3, private_share: 0.2, ratios: [0.2, 0.4, 0.4]}\n"
    ),
}


def small_yaml(folder: Path, app: str) -> str:
    """Write a config of a method on a small generated graph."""
    file = folder / f"{app}.yaml"
    file.write_text(f"app: {app}\n{DATA}{YAML[app]}", encoding="utf-8")
    return str(file)


def audited(folder: Path, app: str, *overrides: str) -> dict[str, Finding]:
    """Audit one setting of a small run; findings by attack."""
    name = small_yaml(folder, app)
    ((_, config),) = settings_of(name, overrides, rounds=None, epsilons=[], alone=True)
    return {finding.attack: finding for finding in audit_run(config)[0]}


def is_a_guess(finding: Finding) -> bool:
    """Say whether a success is within four standard deviations of a guess's."""
    return abs(finding.success - finding.chance) <= 4 * math.sqrt(guess_variance(finding))


def by_words(findings: Mapping[str, Finding], words: str) -> Finding:
    """Find the one attack whose name has these words."""
    (found,) = [found for name, found in findings.items() if words in name]
    return found
