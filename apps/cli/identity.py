"""The commands ``flower-graph identity`` and ``registry``: the SuperNodes of secure sums."""

from __future__ import annotations

import argparse

from flower_graph.apps.cli.say import say
from flower_graph.errors import ConfigError
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.secure.parties.identity import new_identity, public_file, read_public
from flower_graph.secure.parties.registry import Registry, read_numbers, write_numbers


def identity_command(args: argparse.Namespace) -> int:
    """Make a key pair and print where it is."""
    public = new_identity(args.file)
    say(
        f"secret key  {args.file}: show it to nobody",
        f"public key  {public_file(args.file)}: {public.hex()}",
    )
    return 0


def registry_command(args: argparse.Namespace) -> int:
    """Show a registry, or write a new version of it."""
    if args.action == "show":
        say(*_lines(Registry.read(args.registry)))
        return 0
    registry = _changed(args)
    registry.write(args.registry)
    copy = "copy this file to all SuperNodes: those with different versions refuse each other"
    say(*_lines(registry), copy)
    return 0


def _changed(args: argparse.Namespace) -> Registry:
    if args.action == "add":
        new = _opened(args)
        return new.with_party(read_public(args.key), read_numbers(args.clients))
    registry = Registry.read(args.registry)
    if args.action == "rotate":
        return registry.rotated(args.party, read_public(args.key))
    return registry.without(args.party)


def _opened(args: argparse.Namespace) -> Registry:
    most = args.most_clients
    if not args.registry.exists():
        if most is None:
            raise ConfigError(
                f"registry {args.registry}: is not there; for a new one give --most-clients, the "
                "most clients that any SuperNode is granted"
            )
        return Registry({}, most)
    registry = Registry.read(args.registry)
    if most not in (None, registry.most_clients):
        raise ConfigError(
            f"--most-clients {most}: the registry has {registry.most_clients}, which stays"
        )
    return registry


def _lines(registry: Registry) -> list[str]:
    parties, active = registry.parties.values(), len(registry.active)
    few = "" if active >= FEWEST_PARTIES else f"; secure sums need at least {FEWEST_PARTIES}"
    return [
        f"{len(parties)} SuperNode{'s' * (len(parties) != 1)}, {active} active{few}; at most "
        f"{registry.most_clients} client{'s' * (registry.most_clients != 1)} each",
        f"SHA-256 {registry.digest.hex()}",
        *(
            f"{party.number:5}  {party.key.hex()}  clients {write_numbers(party.clients)}"
            + (f"  former keys: {len(party.former)}" if party.former else "")
            + ("  REVOKED" if party.revoked else "")
            for party in parties
        ),
    ]
