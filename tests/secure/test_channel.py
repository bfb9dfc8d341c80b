import pytest
from nacl.bindings import crypto_scalarmult

from flower_graph.errors import RefusedError
from flower_graph.secure.channel import (
    LOW_ORDER,
    agree,
    context,
    is_low_order,
    new_key,
    seal,
    unseal,
)

RUN = bytes(16)


def test_both_sides_agree_as_in_libsodium():
    (a, public_a), (b, public_b) = new_key(), new_key()
    with_itself, with_b = agree(a, [public_a, public_b])
    assert agree(b, [public_a]) == [with_b] != [with_itself]
    assert with_b == crypto_scalarmult(a, public_b)


def test_keys_of_low_order_are_refused():
    private, _ = new_key()
    assert len(LOW_ORDER) == 7
    for public in LOW_ORDER:
        assert is_low_order(public)
        with pytest.raises(RefusedError, match="order"):
            agree(private, [new_key()[1], public])
        assert is_low_order(public[:31] + bytes([public[31] | 128]))
    honest = new_key()[1]
    assert not is_low_order(honest)
    mixed = [honest, *sorted(LOW_ORDER), honest, bytes([*min(LOW_ORDER)[:31], 128])]
    assert [is_low_order(key) for key in mixed] == [False, *[True] * 7, False, True]


def test_contexts_differ():
    runs = (RUN, bytes(15) + b"\1")
    numbers = ((1, 2), (2, 1), (1,), (1, -2))
    seen = {context(what, run, *n) for what in (b"a", b"b") for run in runs for n in numbers}
    assert len(seen) == 2 * 2 * 4


def test_packet_opens_only_as_it_was_sealed():
    secret, key = bytes(range(32)), new_key()[1]
    what_for = context(b"packet", RUN, 1, 2, 3)
    packet = seal(secret, what_for, key, b"shares")
    assert unseal(secret, what_for, key, packet) == b"shares"
    for other in (context(b"packet", RUN, 2, 2, 3), context(b"packet", RUN, 1, 3, 2)):
        assert unseal(secret, other, key, packet) is None
    assert unseal(secret, what_for, new_key()[1], packet) is None
    assert unseal(bytes(32), what_for, key, packet) is None
    for place in range(len(packet)):
        altered = bytearray(packet)
        altered[place] ^= 1
        assert unseal(secret, what_for, key, bytes(altered)) is None
