"""Quiet logs of Flower's own."""

import logging

import pytest


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    """Leave out what Flower's strategies say of every round."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
