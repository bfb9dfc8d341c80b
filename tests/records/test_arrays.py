import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_graph.errors import MalformedReplyError
from flower_graph.wire.arrays import (
    decode_array,
    encode_array,
    pack_integers,
    read_array,
    unpack_integers,
)
from flower_graph.wire.keys import MAX_NUMBER

DTYPES = hnp.floating_dtypes() | hnp.integer_dtypes() | hnp.boolean_dtypes()


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_what_is_written_is_read_back_by_us_and_by_flower(values: np.ndarray) -> None:
    array = encode_array("x", values)
    assert array.data == Array(values).data  # byte for byte what numpy.save writes
    for back in (decode_array("x", array), array.numpy()):
        assert (back.dtype, back.shape) == (values.dtype, values.shape)
        np.testing.assert_array_equal(back, values)


def test_any_memory_order_is_carried() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for view in (values.T, values[::2], values[..., ::-1]):
        np.testing.assert_array_equal(encode_array("x", view).numpy(), view)
        # Flower keeps Fortran order in the bytes.
        np.testing.assert_array_equal(decode_array("x", Array(view)), view)


def test_objects_are_refused_on_the_way_out() -> None:
    with pytest.raises(ValueError, match="'names'"):
        encode_array("names", np.array(["a", None], dtype=object))
    with pytest.raises(ValueError, match="pickle"):
        encode_array("x", np.zeros(2, dtype=[("a", "f4"), ("b", "O")]))
    with pytest.raises(TypeError, match=r"'x'.*numpy\.ndarray"):
        encode_array("x", [1.0])  # type: ignore[arg-type]


def fake(good: Array, **changes: object) -> Array:
    fields = {"dtype": good.dtype, "shape": good.shape, "stype": good.stype, "data": good.data}
    return Array(**(fields | changes))  # type: ignore[call-overload,no-any-return]


def test_arrays_that_lie_are_refused() -> None:
    good = encode_array("x", np.zeros((2, 3), np.float32))
    lies: list[dict[str, object]] = [
        *({"data": data} for data in (good.data[:-4], good.data + b"!", b"")),
        *({"shape": shape} for shape in ((6,), (-1, 3), (2, -1))),
        *({"dtype": "int32"}, {"stype": "torch"}, {"dtype": "no type"}),
        {"dtype": "i4," * 2_000_000 + "i4"},  # NumPy reads it, for minutes
        {"shape": (1,) * 20_000},
        {"data": good.data[:6] + b"\x09" + good.data[7:]},
    ]
    for lie in lies:
        with pytest.raises(MalformedReplyError, match="'x' is not in NumPy's format"):
            decode_array("x", fake(good, **lie))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_value_error(data: bytes) -> None:
    good = encode_array("x", np.zeros(2, np.float32))
    for hostile in (data, good.data[:10] + data, b"\x93NUMPY\x01\x00" + data):
        with pytest.raises(ValueError, match="'x'"):
            decode_array("x", fake(good, data=hostile))


def read(values: np.ndarray, limit: float | None = MAX_NUMBER) -> np.ndarray:
    content = RecordDict({"arrays": ArrayRecord({"x": Array(values)})})
    return read_array(content, "arrays", "x", (3,), limit=limit)


def test_a_number_that_is_too_large_is_refused_but_not_a_word_of_a_ring() -> None:
    for dtype in ("<f2", "<f4", "<f8", "<i4", "<i8", "<u8", "|u1"):
        assert read(np.ones(3, dtype)).tolist() == [1, 1, 1]
    for value in (1e9, -1e9, 2**20 + 1, 2**63 - 1, -(2**63)):
        values = np.array([-MAX_NUMBER, 0, value])
        with pytest.raises(MalformedReplyError, match="most 1"):
            read(values)
        assert (read(values, None) == values).all()
    assert read(np.full(3, -MAX_NUMBER)).tolist() == [-(2.0**20)] * 3


def test_integers_there_and_back() -> None:
    assert pack_integers(np.array([1, 258], np.int32)) == bytes([1, *[0] * 7, 2, 1, *[0] * 6])
    for values in ([], [0], [-1, 2**63 - 1, -(2**63)]):
        data = pack_integers(np.array(values, np.int64))
        assert unpack_integers(data, "users").tolist() == values
    for other in (b"1234567", None, "12345678", [1]):
        with pytest.raises(MalformedReplyError, match=r"users.*64"):
            unpack_integers(other, "users")
