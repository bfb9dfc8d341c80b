"""The files of a run: one line for each round, and in the end a result, curves and weights."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from flower_graph.config.common import CHECKPOINTS
from flower_graph.config.foreign import CONFIG, DATA, IN_RUN, METRICS, RESULT, RUN_OF
from flower_graph.data.description import DataForm
from flower_graph.errors import CheckpointError, OutputError
from flower_graph.records.rounds import RoundReport, read_reports
from flower_graph.report.result import (
    BASELINES,
    best_round,
    make_result,
    metrics_of,
    metrics_shown,
    tested,
)
from flower_graph.storage import files
from flower_graph.storage.files import remove, remove_folder, replaced, saying, written

LOG = logging.getLogger(__name__)
RISE = 10  # a loss above the lowest so far times this, and above the first, is warned of


class RunWriter:
    """The output folder of one run; ``resume_round`` gives the last round of a checkpoint."""

    def __init__(
        self,
        out: Path,
        config: Mapping[str, object],
        *,
        resume_round: Callable[[], int] | None = None,
        steadying: Sequence[str] = (),
        title: str = "",
    ) -> None:
        self._folder = ExitStack()
        made = files.new_folder(out, may_exist=resume_round is not None)
        self.out = self._folder.enter_context(made)
        self.config, self._title = files.plain(config), title
        self._steadying = " or ".join(steadying)  # settings to change when the loss rises
        self._has_warned = self._has_written = False
        self.metrics = self.out / METRICS
        self.reports: list[RoundReport] = []
        self._resumed = resume_round is not None
        try:
            # Checked once the folder is locked: until then another run may write rounds there.
            if resume_round is not None and (last := resume_round()):
                # A run that stopped in its first round may have no such file.
                self.reports = [one for one in read_reports(self.metrics) if one.round <= last]
                if [report.round for report in self.reports] != list(range(1, last + 1)):
                    why = f"rounds 1 to {last} are needed to resume, and some are missing"
                    raise OutputError(f"{self.metrics}: {why}")
        except (OutputError, CheckpointError):
            self.close()
            raise
        self._begun, self._spent = time.perf_counter(), 0.0  # seconds of the rounds before

    def write_round(self, report: RoundReport) -> None:
        """Append one round to ``metrics.jsonl``; give this to a strategy as ``on_round``."""
        self._take_over(report.round)
        self._warn_of_loss(report)
        files.append_line(self.metrics, report.to_record())
        self.reports.append(report)

    def finish(
        self, final: Mapping[str, object], state: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """Write ``weights.safetensors``, ``result.json`` and, last, the pictures."""
        if not self.reports:
            raise OutputError(f"{self.out}: no round was run, so there is no result to write")
        self._take_over()
        seconds = self._spent + time.perf_counter() - self._begun
        made = make_result(self.config, self.reports, seconds)
        result: dict[str, object] = files.plain({**made, **final})
        if state:
            import torch

            from flower_graph.outputs.files import apart
            from flower_graph.storage.formats import write_tensors

            weights = {
                name: one if isinstance(one, torch.Tensor) else torch.tensor(one)
                for name, one in state.items()
            }
            with written(self.out / "weights.safetensors") as stream:
                write_tensors(stream, apart(weights))
        files.write_json(self.out / RESULT, result)
        self._draw({BASELINES[key]: value for key, value in tested(result).items()})
        self.close()
        return result

    def close(self) -> None:
        """Unlock the folder for other runs; remove it if the run had no round."""
        if not (self.reports or self._resumed):
            # Clients may have begun these; other files are not the run's.
            for name in (CHECKPOINTS, IN_RUN):
                with suppress(OSError):
                    remove_folder(self.out / name)
        self._folder.close()

    def _draw(self, baselines: Mapping[str, float]) -> None:
        out, reports, config = self.out, self.reports, self.config
        best = best_round(reports, metrics_of(config)[0]) or reports[-1]
        if len(reports) < 2 and not best.confusion:  # one round alone is no curve
            return
        # Imported here: it takes as long as a short run, and these do without.
        from flower_graph.report import plots

        # Only what differs within a method is named: its models or its strategies
        data, model, strategy = (
            config.get(key, {}).get("name") for key in ("data", "model", "strategy")
        )
        named = config.get("app"), data, model or strategy, f"seed {config.get('seed')}"
        title = " · ".join(str(part) for part in named if part)
        if best.confusion:
            confusion = partial(plots.draw_confusion, nodes=best.confusion)
            about = f"{title} · test, round {best.round}"
            plots.plot(out / "confusion.png", [[confusion]], about, size=(5.2, 4.4))
        if len(reports) < 2:
            return
        panels = plots.panels_of([reports], metrics_shown(config), baselines)
        plots.plot_panels(out / "curves.png", [panels], title)
        if any(report.participation for report in reports):
            who = partial(plots.draw_participation, reports=reports)
            plots.plot(out / "participation.png", [[who]], title)

    def _take_over(self, server_round: float = math.inf) -> None:
        """Write the settings, and cut a resumed run's files back to the round before this one."""
        # Called with the first round, not earlier: a new run that fails before leaves no file, and
        # if a checkpoint of other settings is refused, the old run's files must stay as they were.
        if self._has_written:
            return
        self._has_written = True
        if self._resumed:
            # The checkpoint that was taken may be older than the last one
            self.reports = [one for one in self.reports if one.round < server_round]
            self._spent = sum(one.seconds for one in self.reports)
            remove(self.out / RESULT)
            with written(self.metrics) as stream:
                stream.writelines(files.json_line(report.to_record()) for report in self.reports)
        write_config(self.out, self.config, self._title)

    def _warn_of_loss(self, report: RoundReport) -> None:
        """Warn once if the loss rises tenfold or is not a number; name settings to change."""
        earlier = [one.loss for one in self.reports if math.isfinite(one.loss)]
        if not math.isfinite(report.loss):
            is_bad = not report.privacy  # under a budget clients may withhold their losses
        else:
            is_bad = bool(earlier) and report.loss > max(earlier[0], RISE * min(earlier))
        if is_bad and not self._has_warned:
            self._has_warned = True
            # The first steps may overshoot and come back, as those of `nfedgnn/cora` do
            advice = f"; if it stays so, lower {self._steadying}" if self._steadying else ""
            LOG.warning("round %d: the loss is %.4g%s", report.round, report.loss, advice)


def write_config(folder: Path, config: Mapping[str, object], title: str = "") -> None:
    """Write a run's settings as ``load_run`` reads them, for their owner alone.

    ``title`` is the config's name; the first line, a comment, has it.
    """
    head = f"{RUN_OF}{' '.join(title.split())}\n" if title else ""
    with saying(folder / CONFIG), replaced(folder / CONFIG) as stream:
        text = OmegaConf.to_yaml(OmegaConf.create(files.plain(config)))
        stream.write((head + text).encode())


def write_data_form(folder: Path, form: DataForm | None) -> None:
    """Write the form of new graphs, if it is known, readable by its owner alone."""
    if form is not None:
        with saying(folder / DATA), replaced(folder / DATA) as stream:
            stream.write(f"{json.dumps(form.to_json())}\n".encode())
