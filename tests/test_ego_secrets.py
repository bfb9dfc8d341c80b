"""Keys and slots go from message to message, in this process or through bytes."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.errors import StateLostError
from flower_graph.secure import secret_store as vault
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext_client import (
    PlaintextAlignmentClient,
    PolynomialAlignmentClient,
)
from flower_graph.strategies.masked_embedding_averaging.secrets import EgoSecrets

RUN = b"0123456789abcdef"
IDENTITIES: dict[int, list[Any]] = {3: [10, 11], 5: [11]}
FORMS = {
    "psi": AlignmentClient,
    "polynomial": PolynomialAlignmentClient,
    "plain": PlaintextAlignmentClient,
    "none": PlaintextAlignmentClient,
}


def context_of() -> Context:
    return Context(1, 2, {"state-dir": ""}, RecordDict(), {})


@pytest.mark.parametrize("form", FORMS)
def test_they_last(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of()
    reply = EgoSecrets(context, IDENTITIES).begin(RUN, form)
    assert reply.clients.tolist() == [3, 5]
    for process in ("same", "other"):
        if process == "other":
            monkeypatch.setattr(vault, "_LIVE", {})
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
    monkeypatch.setattr(vault, "_LIVE", {})
    with pytest.raises(StateLostError, match="belong to other clients"):
        EgoSecrets(context, {3: [10, 11]}).load()


def test_nothing_is_there_before_and_after() -> None:
    secrets = EgoSecrets(context_of(), IDENTITIES)
    with pytest.raises(StateLostError, match="are not here"):
        secrets.load()
    secrets.begin(RUN, "psi")
    secrets.drop()
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
