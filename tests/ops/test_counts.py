"""Metrics of summed counts are scikit-learn's of the pooled predictions."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, roc_auc_score
from torch import Tensor

from flower_graph.config.common import counting_of
from flower_graph.ops.counts import Counts, auc, balanced_accuracy, count, count_size, macro_f1

ROLES = ("train", "val", "test")


def predictions(scale: float, seed: int = 0, n: int = 3000) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), n, True, generator=rng)
    logits = torch.nn.functional.one_hot(y, 4) + 1.2 * torch.randn(n, 4, generator=rng)
    return scale * logits, y


def masks_of(n: int) -> dict[str, Tensor]:
    return {role: torch.arange(n) % 3 == place for place, role in enumerate(ROLES)}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 12.0])  # of one that knows little yet, of a sure one
def test_sums_of_clients_counts_give_what_scikit_learn_does(scale: float) -> None:
    logits, y = predictions(scale)
    masks = masks_of(len(y))
    parts = [slice(0, 700), slice(700, 701), slice(701, None)]
    counted = [
        count(logits[part], y[part], {r: m[part] for r, m in masks.items()}, 2) for part in parts
    ]
    total = counted[0] + counted[1] + counted[2]
    assert total.histograms is not None
    for place, role in enumerate(ROLES):
        label, rows = y[masks[role]].numpy(), logits[masks[role]].double()
        said = rows.argmax(1).numpy()
        assert np.array_equal(total.confusion[place], confusion_matrix(label, said))
        found = total.confusion[place]
        assert macro_f1(found) == pytest.approx(f1_score(label, said, average="macro"))
        assert balanced_accuracy(found) == pytest.approx(balanced_accuracy_score(label, said))
        area = roc_auc_score(label, rows.softmax(1).numpy(), multi_class="ovr")
        assert auc(total.histograms[place]) == pytest.approx(area, abs=0.002)


def test_by_hand() -> None:
    """Of two nodes of class 0 one is right, of one of class 1 none; class 2 is only predicted."""
    logits = torch.tensor([[2.0, 0, 0], [0, 0, 2.0], [2.0, 0, 0], [9.0, 0, 0]])
    y = torch.tensor([0, 0, 1, -1])  # the last has no label
    counts = count(logits, y, {"test": torch.ones(4) > 0}, 2)
    assert counts.confusion.tolist() == [[[1, 0, 1], [1, 0, 0], [0, 0, 0]]]
    assert macro_f1(counts.confusion[0]) == pytest.approx((0.5 + 0 + 0) / 3)
    assert balanced_accuracy(counts.confusion[0]) == pytest.approx((0.5 + 0) / 2)
    # Class 0: its two against one, one of which ties and one is below. Class 1: the one with the
    # label ties with both others. Class 2 has no node.
    assert counts.histograms is not None
    assert auc(counts.histograms[0]) == pytest.approx(((0.5 + 0) / 2 + (0.5 + 0.5) / 2) / 2)


def test_without_nodes_there_is_no_figure() -> None:
    nobody = {"val": torch.zeros(2) > 0}
    empty = count(torch.zeros(2, 3), torch.tensor([0, 1]), nobody, 2)
    assert empty.histograms is not None
    for value in (macro_f1(empty.confusion[0]), balanced_accuracy(empty.confusion[0])):
        assert np.isnan(value)
    assert np.isnan(auc(empty.histograms[0]))


@pytest.mark.parametrize("parts", [1, 2])
def test_counts_survive_a_row(parts: int) -> None:
    logits, y = predictions(1.0, n=60)
    counts = count(logits, y, masks_of(60), parts)
    row = counts.flat()
    assert row.numel() == count_size(4, parts)
    back = Counts.of_flat(row, 4, parts)
    assert torch.equal(back.flat(), row) and len(back.parts) == parts


def test_a_row_that_is_no_count_is_refused() -> None:
    logits, y = predictions(1.0, n=60)
    row = count(logits, y, masks_of(60), 2).flat()
    below, other = row.clone(), row.clone()
    below[0], other[0] = -1, other[0] + 1
    for wrong in (row[:-1], below, other):
        with pytest.raises(ValueError, match="counts"):
            Counts.of_flat(wrong, 4, 2)


def test_only_what_is_asked_for_is_counted() -> None:
    assert counting_of(["accuracy"]) == ""
    assert counting_of(["accuracy", "macro-f1"]) == "confusion"
    assert counting_of(["auc"]) == "histograms"
