"""Whatever a file holds, who reads it says so in one of our errors, soon and within bounds."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hostile_files import npy, packed, try_all
from safetensors.torch import save

from flower_graph.storage.formats import load_saved, read_arrays, read_tensors


def check(count: int, by_hand: int, seed: int = 0) -> None:
    """Try files in a process of their own, whose memory is theirs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(try_all, count, by_hand, seed).result()


@pytest.mark.slow
def test_some_files_that_are_damaged_or_do_harm() -> None:
    check(45, 24)


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_all_files_that_are_damaged_or_do_harm(seed: int) -> None:
    check(1500, 1, seed)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_honest_is_read(tmp_path: Path, zipped: bool) -> None:
    """Views, sparse tensors, repeated numbers and lists that are there twice are no attack."""
    base, names = torch.arange(10.0), ["a", "b"]
    honest = {
        "view": base[2:5],
        "turned": torch.rand(3, 4).T,
        "repeated": torch.ones(1).expand(1000),
        "sparse": torch.eye(3).to_sparse_csr(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.empty(0, 5),
        "own": torch.nn.Parameter(base),
        "names": names,
        "again": names,
        "nested": [(1, [2, {"a": b"bytes"}])],
        "set": {1, 2},
        7: 2**70,
    }
    path = tmp_path / "honest.pt"
    torch.save(honest, path, _use_new_zipfile_serialization=zipped)
    found = load_saved(path)
    assert found.keys() == honest.keys()
    for name, value in honest.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name].to_dense(), value.to_dense())
        else:
            assert found[name] == value


@pytest.mark.parametrize("zipped", [True, False])
def test_a_sparse_tensor_with_places_beyond_its_size_is_refused(
    tmp_path: Path, zipped: bool
) -> None:
    ones, far, size = torch.ones(2), torch.tensor([0, 2**40]), (4, 4)
    coo = torch.sparse_coo_tensor(torch.stack([far, far]), ones, size, check_invariants=False)
    ptr = torch.tensor([0, 2, 2, 2, 2])
    csr = torch.sparse_csr_tensor(ptr, far, ones, size, check_invariants=False)
    for x in (coo, csr):
        path = tmp_path / "graph.pt"
        torch.save({"x": x}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(RuntimeError, match=r"ncols|inconsistent"):
            load_saved(path)


def test_what_would_unfold_without_bounds_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(packed({"a.npy": npy("<i8", "(8,)")}))
    assert read_arrays(path)["a"].tolist() == [0] * 8
    for data in (packed({"a.npy": npy("<i8", "(8,)")}, how) for how in (12, 14)):  # bzip2, LZMA
        path.write_bytes(data)
        with pytest.raises(ValueError, match="without bounds"):
            read_arrays(path)
    path.write_bytes(packed({"a.npy": npy("<i8", "(7,)")}))
    with pytest.raises(ValueError, match="more bytes"):
        read_arrays(path)
    path.write_bytes(save({str(number): torch.zeros(0) for number in range(20)}))
    assert len(read_tensors(path)[0]) == 20
    with pytest.raises(ValueError, match="its head has"):
        read_tensors(path, 1000)
