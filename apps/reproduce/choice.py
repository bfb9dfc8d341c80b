"""The choice of settings by validation: what was tried, and what was taken."""

from __future__ import annotations

from pathlib import Path

from flower_graph.apps.reproduce.asked import Asked, Group
from flower_graph.apps.reproduce.experiments import Run, Runs, Store, kept_runs
from flower_graph.apps.reproduce.page import formatted, markdown
from flower_graph.apps.reproduce.rows import best_experiment, row, to_the_end
from flower_graph.storage.files import write_text
from flower_graph.storage.reading import Tree

BEST = "best-val-"  # begins the name of a figure, which ends with its metric

TEXT = """# How settings were chosen

Of each row's settings that with the best mean validation {metric}, in the round where that is best,
is taken (**bold**); no choice looked at a test {metric}. *Rounds* are those run, for each seed;
*ended*: validation had stopped improving in all of them. All figures: `choices` in `runs.json.xz`.
"""


def needed(asked: Asked, store: Store) -> set[Run]:
    """Return the runs that choose settings, and those with the chosen settings, or the first."""
    result = set[Run]()
    for group in asked.groups():
        kept = kept_runs(group.choices, store)
        one = best_experiment(group, kept) if is_made(group, kept) else group.experiments[0]
        result |= {*group.choices, *(run for run in group.runs if run.experiment == one)}
    return result


def is_made(group: Group, runs: Runs) -> bool:
    """Return whether all runs that choose were done."""
    return all(run.seed in runs.get(run.experiment, {}) for run in group.choices)


def write_choices(out: Path, asked: Asked, runs: Runs) -> list[Tree]:
    """Write the page about the choices, if there are any, and return them."""
    rows = [made for group in asked.groups() for made in choices(group, runs)]
    # Several tables may have what was chosen once
    rows = [*{str(made["settings"]): made for made in reversed(rows)}.values()][::-1]
    if not rows:
        return []
    lines = [
        [
            made["where"],
            ("**{}**" if made["taken"] else "{}").format(" ".join(made["tried"]) or "as it ships"),
            formatted("accuracy", [made]),
            ", ".join(map(str, made["seeds"])),
            ", ".join(map(str, made["rounds"])),
            "yes" if made["ended"] else "no",
        ]
        for made in rows
    ]
    columns = ["row", "settings", "best validation", "seeds", "rounds", "ended"]
    metrics = dict.fromkeys(made["metric"].removeprefix(BEST) for made in rows)
    page = [TEXT.format(metric=" or ".join(metrics)), *how_many(asked), *markdown(columns, lines)]
    write_text(out / "choices.md", "\n".join(page) + "\n")
    return rows


def how_many(asked: Asked) -> list[str]:
    """Say how many settings each method chooses among, if some choose among more than others."""
    groups, grid = asked.groups(), asked.table.grid
    tried = {one.method: len(grid.of(one.method, one.model)) for one in groups if one.choosers}
    few = min(tried.values())
    more = [f"{method} {count}" for method, count in tried.items() if count > few]
    if not more:
        return []
    return [
        f"Not all choose among equally many: {', '.join(more)}, the others {few}. Among more "
        "settings the best validation is higher by chance alone.\n"
    ]


def choices(group: Group, runs: Runs) -> list[Tree]:
    """List the settings that were tried for a row, each with its validation accuracy."""
    taken = group.experiments.index(best_experiment(group, runs)) if is_made(group, runs) else None
    result = []
    for number, one in enumerate(group.tried if group.choosers else ()):
        kept = {s: runs[one][s] for s in group.choosers if s in runs.get(one, {})}
        if kept:
            best = {seed: curves.best_val for seed, curves in kept.items()}
            metric = BEST + next(iter(kept.values())).metric
            made = row(group.part.table, one, metric, best, group.rounds)
            end = to_the_end(one, kept, group.rounds)
            made |= {"method": group.shown, **group.keys, **end}
            others = [other.overrides for other in group.tried]
            tried = [s for s in one.overrides if any(s not in other for other in others)]
            result.append(made | {"where": group.words, "tried": tried, "taken": number == taken})
    return result
