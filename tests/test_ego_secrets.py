"""Keys and slots go from message to message, in this process or through bytes."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.errors import StateLostError
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext import PlaintextAlignmentClient
from flower_graph.secure.align.polynomial import PolynomialAlignmentClient
from flower_graph.strategies.masked_embedding_averaging import secrets as ego_secrets
from flower_graph.strategies.masked_embedding_averaging.secrets import EgoSecrets

RUN = b"0123456789abcdef"
IDENTITIES: dict[int, list[Any]] = {3: [10, 11], 5: [11]}
FORMS = {
    "psi": AlignmentClient,
    "polynomial": PolynomialAlignmentClient,
    "plain": PlaintextAlignmentClient,
    "none": PlaintextAlignmentClient,
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_process(monkeypatch)


def context_of(state_dir: str = "", node_id: int = 2) -> Context:
    return Context(1, node_id, {"state-dir": state_dir}, RecordDict(), {})


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ego_secrets, "_LIVE", {})


@pytest.mark.parametrize("form", FORMS)
def test_they_last(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of()
    reply = EgoSecrets(context, IDENTITIES).begin(RUN, form)
    assert reply.clients.tolist() == [3, 5]
    for process in ("same", "other"):
        if process == "other":
            forget_process(monkeypatch)
        found, host, aligner = EgoSecrets(context, IDENTITIES).load()
        assert found == form
        assert isinstance(aligner, FORMS[form])
        assert (host.run_id, host.clients) == (RUN, [3, 5])
        assert (host.keys().channel_keys == reply.channel_keys).all()
        EgoSecrets(context, IDENTITIES).keep(found, host, aligner)


def test_a_new_run_has_new_keys() -> None:
    context = context_of()
    secrets = EgoSecrets(context, IDENTITIES)
    one, other = secrets.begin(RUN, "psi"), secrets.begin(RUN[::-1], "psi")
    assert not (one.channel_keys == other.channel_keys).all(1).any()
    assert secrets.load()[1].run_id == RUN[::-1]


def test_keys_of_other_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of()
    EgoSecrets(context, IDENTITIES).begin(RUN, "psi")
    monkeypatch.setattr(ego_secrets, "_LIVE", {})
    with pytest.raises(StateLostError, match="belong to other clients"):
        EgoSecrets(context, {3: [10, 11]}).load()


@pytest.mark.parametrize("state_dir", ["", ":memory:"])
def test_the_objects_themselves_come_back_in_the_same_process(state_dir: str) -> None:
    context = context_of(state_dir)
    EgoSecrets(context, IDENTITIES).begin(RUN, "psi")
    kept = EgoSecrets(context, IDENTITIES).load()
    assert EgoSecrets(context, IDENTITIES).load() is kept


def test_in_process_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(":memory:")
    EgoSecrets(context, IDENTITIES).begin(RUN, "psi")
    assert list(context.state["ego-secrets"]) == ["token"]
    forget_process(monkeypatch)
    with pytest.raises(StateLostError, match="its keys went with another process"):
        EgoSecrets(context, IDENTITIES).load()


def test_a_context_that_was_taken_back_gives_the_older_objects() -> None:
    # A message that failed after its work: Flower goes on with the context of before.
    context = context_of()
    first = EgoSecrets(context, IDENTITIES).begin(RUN, "psi")
    before = context.state["ego-secrets"].copy()
    EgoSecrets(context, IDENTITIES).begin(RUN[::-1], "psi")
    context.state["ego-secrets"] = before
    host = EgoSecrets(context, IDENTITIES).load()[1]
    assert host.run_id == RUN
    assert (host.keys().channel_keys == first.channel_keys).all()


def test_nothing_is_there_before_and_after_nor_at_other_nodes() -> None:
    context = context_of()
    secrets, other = EgoSecrets(context, IDENTITIES), EgoSecrets(context_of(node_id=6), IDENTITIES)
    secrets.begin(RUN, "psi")
    with pytest.raises(StateLostError, match="client 6: its keys of this run are not here"):
        other.load()
    secrets.drop()
    secrets.drop()
    assert not list(context.state.keys())
    assert ego_secrets._LIVE == {}
    with pytest.raises(StateLostError, match="are not here"):
        secrets.load()


@pytest.mark.parametrize("form", ["psi", "plain", "polynomial"])
@pytest.mark.parametrize(
    "wrong", [[77077, "seventeen"], ["seventeen", "seventeen"], [2.5, 77077], [77077, 77077]]
)
def test_what_is_wrong_with_identities_is_said_without_them(wrong: list[Any], form: str) -> None:
    # The server reads what an error says.
    with pytest.raises(ValueError, match="client 8") as caught:
        EgoSecrets(context_of(), {8: wrong}).begin(RUN, form)
    assert not any(str(identity) in str(caught.value) for identity in wrong)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="alignment is 'guess', must be one of psi"):
        EgoSecrets(context_of(), IDENTITIES).begin(RUN, "guess")
